"""Find the executable runs of a sweep, and the checkpoint from which a run resumes. Refuse to resume with changed settings."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.checkpoint.on_disk import FOLDER, Record, StoredCheckpoint, candidates, good_checkpoints
from meshrunner.recipes.config_keys import affected_by, differences, flatten, with_defaults
from meshrunner.recipes.errors import ConfigError, Incompatible, NotImported
from meshrunner.recipes.option import Affects
from meshrunner.recipes.weights.initial import check_weights
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.validation import listed
from meshrunner.runner.console import one_line, warn
from meshrunner.runner.rundir import RESULTS, find_damage, read_config, read_state, run_names, sweep_damage
from meshrunner.runner.rundir.files import is_run

STAY_THE_SAME = Affects.RESULT | Affects.CHANCE | Affects.SWEEP
"""Effects (see `Affects`) of keys whose values must not change between a checkpoint and the run that resumes from it."""


class Usable(NamedTuple):
    """The runs of a sweep that can be executed."""

    run_dirs: list[Path]
    first: Experiment
    """Experiment of the first run in `run_dirs`. The keys `sweep.*` of this experiment apply to the whole sweep."""
    damaged: int
    """Number of damaged runs, plus 1 if the sweep's own files are damaged. Missing run directories are not counted."""


def usable_runs(sweep_dir: Path, names: Sequence[str]) -> Usable:
    """Return the runs of a sweep that can be executed, and warn about all others. Raise ConfigError if no run can be executed."""
    problems = [damage] if (damage := sweep_damage(sweep_dir)) else []
    run_dirs: list[Path] = []
    first: Experiment | None = None
    for name in names:
        run_dir = sweep_dir / name
        if not run_dir.is_symlink() and not run_dir.is_dir():
            warn(f"skipping a missing run directory: {one_line(run_dir)}")
            continue
        try:
            if damage := find_damage(run_dir) if is_run(run_dir) else "it has no config.yaml":
                raise ConfigError(damage)
            if first is None or read_state(run_dir) not in RESULTS:  # a run with a result is rarely executed again
                experiment = check(read_config(run_dir))
                first = first or experiment
            run_dirs.append(run_dir)
        except NotImported as error:  # stop here: other runs may need the same missing class
            raise NotImported(f"{run_dir}: {error}") from None
        except ConfigError as error:
            problems.append(f"damaged: {run_dir}: {error}")
    for problem in problems:
        warn(one_line(problem))
    if first is None:
        raise ConfigError(f"{sweep_dir} holds no run that can be executed")
    return Usable(run_dirs, first, len(problems))


def first_experiment(sweep_dir: Path) -> Experiment:
    """Return the experiment of a sweep's first readable run; raise ConfigError if no run is readable."""
    for name in run_names(sweep_dir):
        with suppress(ConfigError):
            return check(read_config(sweep_dir / name))
    raise ConfigError(f"{sweep_dir} holds no run that can be read")


def check_existing(run_dir: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError if `run_dir` holds a run with another configuration. The sections `sweep` and `tune` may differ."""
    sections = [name for name, value in config.items() if isinstance(value, dict)]
    before = read_config(run_dir) if is_run(run_dir) else config
    changed = differences(with_defaults(before, sections), with_defaults(config, sections))
    lines = [
        f"{key}: {'absent' if old is ... else repr(old)} on disk, {'absent' if new is ... else repr(new)} now"
        for key, old, new in changed
        if key.partition(".")[0] not in ("sweep", "tune")
    ]
    if lines:
        problem = f"{run_dir} holds a run with another configuration. Choose another hydra.sweep.dir. Differences:"
        raise ConfigError(listed(problem, lines))


def fit_continuing(
    experiment: Experiment, run_dir: Path, workers: int, *, force: bool = False
) -> tuple[Experiment, StoredCheckpoint | None]:
    """Return the experiment to execute and the checkpoint to resume from (None if the run starts at step 1). Replace a null
    `global_batch` by the checkpoint's value. Raise Incompatible if settings conflict (see `fit`). Raise ConfigError if no steps
    are left to train. Also raise it, unless `force` is true, if settings that affect the result have changed."""
    found, warnings = candidates(experiment.checkpoint.load, run_dir / FOLDER)
    for warning in warnings:
        warn(warning)
    if not found:
        fit(experiment, workers)
        check_weights(experiment)
        return experiment, None
    record, own = found[0].record, found[0].path.parent == run_dir / FOLDER
    if own and not force:
        _refuse_changes(record, experiment, run_dir)
    if not own and record.step >= experiment.steps:
        raise ConfigError(
            f"checkpoint.load: '{found[0].path}' is at step {record.step} and steps={experiment.steps}, so nothing is left "
            "to train; raise steps"
        )
    resumed = experiment.resumed_from(record)
    try:
        fit(resumed, workers)
    except Incompatible as error:
        if resumed.global_batch == experiment.global_batch:
            raise
        raise Incompatible(
            f"{error}\n  (global_batch is null, so the checkpoint's global batch of {resumed.global_batch} applies)"
        ) from None
    return resumed, found[0]


def _refuse_changes(record: Record, experiment: Experiment, run_dir: Path) -> None:
    before, now = record.config, experiment.model_dump(mode="json")
    with suppress(ConfigError):
        before = check(before).model_dump(mode="json")  # adds defaults of keys newer than the checkpoint
    if experiment.precision.kind == "auto":  # `precision` is compared later, when a node has resolved `auto`
        before["precision"] = now["precision"]
    flat = flatten(now)
    changed = [each for each in differences(before, now) if affected_by(each[0], flat) & STAY_THE_SAME]
    if not changed:
        return
    pairs = ((key, *("absent" if value is ... else repr(value) for value in values)) for key, *values in changed)
    title = f"The configuration has changed since the checkpoint of step {record.step} was written:"
    text = listed(title, (f"{key}: was {old}, is {new}" for key, old, new in pairs))
    hint = f"`meshrunner resume {run_dir} --force` continues with the new values; choose another hydra.run.dir for a new run"
    raise ConfigError(f"{text}\n{hint}")


def more_to_train(experiment: Experiment, run_dir: Path, trained: int) -> bool:
    """Return whether `steps` was raised after a run completed. Raise ConfigError if steps remain but no checkpoint is usable."""
    if experiment.steps <= trained:
        return False
    good, warnings = good_checkpoints(run_dir / FOLDER)
    if not good:
        problem = (
            f"{run_dir} completed {trained} steps and has no usable checkpoint from which to continue to step "
            f"{experiment.steps}; choose another hydra.run.dir for a new run"
        )
        raise ConfigError(listed(problem, warnings))
    return True

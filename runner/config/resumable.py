"""Run directories that exist: which can be executed, from which checkpoint, and whether the configuration still matches it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.checkpoint.on_disk import FOLDER, Record, StoredCheckpoint, candidates, good_checkpoints
from meshrunner.recipes.config_keys import affected_by, differences, flatten
from meshrunner.recipes.errors import ConfigError, Incompatible, NotImported
from meshrunner.recipes.option import Affects
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.console import one_line, warn
from meshrunner.runner.rundir import RESULTS, find_damage, read_config, read_state, sweep_damage
from meshrunner.runner.rundir.files import is_run

STAY_THE_SAME = Affects.RESULT | Affects.CHANCE | Affects.SWEEP
"""Effects of the keys that a run continues with. Others may change: the global batch stays what it was."""


class Usable(NamedTuple):
    """The executable runs of a sweep."""

    run_dirs: list[Path]
    first: Experiment
    """The first run's experiment, which has the settings of the sweep."""
    damaged: int
    """Number of runs that cannot be executed."""


def usable_runs(sweep_dir: Path, names: Sequence[str]) -> Usable:
    """Return the executable runs of a sweep, and warn about the others; raise ConfigError if there is none."""
    problems = [damage] if (damage := sweep_damage(sweep_dir)) else []
    run_dirs: list[Path] = []
    first: Experiment | None = None
    for name in names:
        run_dir = sweep_dir / name
        if not run_dir.is_symlink() and not run_dir.is_dir():
            warn(f"missing: {one_line(run_dir)}")
            continue
        try:
            if damage := find_damage(run_dir) if is_run(run_dir) else "it has no config.yaml":
                raise ConfigError(damage)
            if first is None or read_state(run_dir) not in RESULTS:  # most commands do not execute others again
                experiment = check(read_config(run_dir))
                first = first or experiment
            run_dirs.append(run_dir)
        except NotImported as error:  # the run is not damaged, and others may need the same class
            raise NotImported(f"{run_dir}: {error}") from None
        except ConfigError as error:
            problems.append(f"damaged: {run_dir}: {error}")
    for problem in problems:
        warn(one_line(problem))
    if first is None:
        raise ConfigError(f"{sweep_dir} holds no run that can be executed")
    return Usable(run_dirs, first, len(problems))


def first_experiment(sweep_dir: Path, names: Sequence[str]) -> Experiment:
    """Return the experiment of a sweep's first readable run; raise ConfigError if there is none."""
    for name in names:
        with suppress(ConfigError):
            return check(read_config(sweep_dir / name))
    raise ConfigError(f"{sweep_dir} holds no run that can be read")


def fit_continuing(
    experiment: Experiment, run_dir: Path, workers: int, *, force: bool = False
) -> tuple[Experiment, StoredCheckpoint | None]:
    """
    Return the experiment resumed from its checkpoint, and that checkpoint; without one the experiment as it is, and None.

    Raise ConfigError if no steps are left or, unless `force`, if keys that affect the result have changed; Incompatible as `fit`.
    """
    found, warnings = candidates(experiment.checkpoint.load, run_dir / FOLDER)
    for warning in warnings:
        warn(warning)
    if not found:
        fit(experiment, workers)
        return experiment, None
    record, own = found[0].record, found[0].path.parent == run_dir / FOLDER
    if own and not force:
        _refuse_changes(record, experiment, run_dir)
    if not own and record.step >= experiment.steps:
        raise ConfigError(
            f"checkpoint.load: '{found[0].path}' is at step {record.step} and steps is {experiment.steps}, so nothing is left "
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
    """Raise ConfigError that names every changed key that affects the result."""
    before, now = record.config, experiment.model_dump(mode="json")
    with suppress(ConfigError):
        before = check(before).model_dump(mode="json")  # adds the defaults of newer keys
    if experiment.precision.kind == "auto":  # resolved and compared where the run starts
        before["precision"] = now["precision"]
    flat = flatten(now)
    changed = [each for each in differences(before, now) if affected_by(each[0], flat) & STAY_THE_SAME]
    if not changed:
        return
    pairs = ((key, *("absent" if value is ... else repr(value) for value in values)) for key, *values in changed)
    lines = [f"  {key}: was {old}, is {new}" for key, old, new in pairs]
    title = f"The configuration has changed since the checkpoint of step {record.step} was written:"
    hint = f"`meshrunner resume {run_dir} --force` continues with the new values; choose another hydra.run.dir for a new run"
    raise ConfigError("\n".join([title, *lines, hint]))


def more_to_train(experiment: Experiment, run_dir: Path, trained: int) -> bool:
    """Return whether `steps` of a completed run has been raised; raise ConfigError if there is no checkpoint to continue from."""
    if experiment.steps <= trained:
        return False
    good, warnings = good_checkpoints(run_dir / FOLDER)
    if not good:
        problem = (
            f"{run_dir} completed {trained} steps and has no usable checkpoint from which to continue to step "
            f"{experiment.steps}; choose another hydra.run.dir for a new run"
        )
        raise ConfigError("\n  ".join([problem, *warnings]))
    return True

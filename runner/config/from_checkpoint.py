"""Continue a run directory: choose the checkpoint to load, and check that the configuration still matches it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from meshrunner.recipes.checkpoint.on_disk import FOLDER, Record, StoredCheckpoint, candidates, good_checkpoints
from meshrunner.recipes.config_keys import affected_by, differences, flatten
from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.recipes.option import Affects
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.console import warn

STAY_THE_SAME = Affects.RESULT | Affects.CHANCE | Affects.SWEEP
"""Effects of the keys that a run continues with. Others may change: the global batch stays what it was."""


def fit_continuing(
    experiment: Experiment, run_dir: Path, workers: int, *, force: bool = False
) -> tuple[Experiment, StoredCheckpoint | None]:
    """
    Return the experiment resumed from its checkpoint, and that checkpoint; without one the experiment as it is, and None.

    Warn about checkpoints that are skipped. Raise ConfigError if the checkpoint does not belong to this experiment, if no steps
    are left, or, unless `force`, if keys have changed that affect what is trained; raise Incompatible as `fit` does.
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

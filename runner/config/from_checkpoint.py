"""Continue a run directory: choose the checkpoint to load, and check that the configuration still matches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrunner.recipes.checkpoint.on_disk import FOLDER, Record, StoredCheckpoint, candidates, good_checkpoints
from meshrunner.recipes.config_keys import affected_by, differences, flatten
from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.recipes.option import Affects
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.console import warn

STAY_THE_SAME = Affects.RESULT | Affects.CHANCE | Affects.SWEEP
"""Effects of the keys that a run continues with. Others may change: the global batch stays what it was."""


def continuing(experiment: Experiment, run_dir: Path, *, force: bool) -> tuple[Experiment, StoredCheckpoint | None]:
    """
    Return the experiment resumed from its checkpoint, and that checkpoint; without one the experiment as it is, and None.

    Warns about checkpoints that are skipped.

    Args:
        force: continue with the new configuration even if it has changed.

    Raises:
        ConfigError: `checkpoint.load` does not exist, the checkpoint is of another model, no steps are left, or keys have
            changed that affect what is trained.
    """
    found, warnings = candidates(experiment.checkpoint.load, run_dir / FOLDER)
    for warning in warnings:
        warn(warning)
    if not found:
        return experiment, None
    record, own = found[0].record, found[0].path.parent == run_dir / FOLDER
    if own and not force:
        _refuse_changes(record, experiment, run_dir)
    if not own and record.step >= experiment.steps:
        raise ConfigError(
            f"checkpoint.load: '{found[0].path}' is at step {record.step} and steps is {experiment.steps}, so nothing is left "
            "to train; raise steps"
        )
    return experiment.resumed_from(record), found[0]


def fit_continuing(
    experiment: Experiment, run_dir: Path, workers: int, *, force: bool = False
) -> tuple[Experiment, StoredCheckpoint | None]:
    """Return the result of `continuing`, checked by `fit`."""
    found, stored = continuing(experiment, run_dir, force=force)
    try:
        fit(found, workers)
    except Incompatible as error:
        if found.global_batch == experiment.global_batch:
            raise
        raise Incompatible(
            f"{error}\n  (global_batch is null, so the checkpoint's global batch of {found.global_batch} applies)"
        ) from None
    return found, stored


def _refuse_changes(record: Record, experiment: Experiment, run_dir: Path) -> None:
    """Raise ConfigError that names every changed key that affects the result."""
    before, now = _with_defaults(record.config), experiment.model_dump(mode="json")
    if experiment.precision.kind == "auto":  # resolved and compared where the run starts
        before["precision"] = now["precision"]
    flat = flatten(now)
    changed = [each for each in differences(before, now) if affected_by(each[0], flat) & STAY_THE_SAME]
    if not changed:
        return
    lines = [f"  {key}: was {_shown(old)}, is {_shown(new)}" for key, old, new in changed]
    title = f"The configuration has changed since the checkpoint of step {record.step} was written:"
    hint = f"`meshrunner resume {run_dir} --force` continues with the new values; choose another hydra.run.dir for a new run"
    raise ConfigError("\n".join([title, *lines, hint]))


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the defaults of keys that are newer than it."""
    try:
        return check(config).model_dump(mode="json")
    except ConfigError:
        return config


def _shown(value: Any) -> str:
    return "absent" if value is ... else repr(value)


def more_to_train(experiment: Experiment, run_dir: Path, trained: int) -> bool:
    """
    Return whether `steps` of a completed run has been raised since it ended.

    Args:
        trained: steps that the run has completed.

    Raises:
        ConfigError: `steps` has been raised, but there is no checkpoint to continue from.
    """
    if experiment.steps <= trained:
        return False
    good, warnings = good_checkpoints(run_dir / FOLDER)
    if not good:
        lines = [
            f"{run_dir} completed {trained} steps and has no usable checkpoint from which to continue to step "
            f"{experiment.steps}; choose another hydra.run.dir for a new run",
            *warnings,
        ]
        raise ConfigError("\n  ".join(lines))
    return True

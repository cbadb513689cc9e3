"""Continuing a run directory: which checkpoint, and whether the configuration is still that of the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.checkpoint.on_disk import FOLDER, candidates, good
from meshrunner.recipes.config_diff import differences
from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.config.experiment import check, fit
from meshrunner.runner.console import warn

if TYPE_CHECKING:
    from meshrunner.recipes.checkpoint.on_disk import Record, Stored
    from meshrunner.runner.config.experiment import Experiment

MAY_CHANGE = ("steps", "log_every", "launch.", "tracker.", "checkpoint.", "parallelism.")
"""Keys, or beginnings of keys, that do not decide what a step computes."""


def continuing(experiment: Experiment, run_dir: Path, *, force: bool) -> tuple[Experiment, Stored | None]:
    """
    The checkpoint that a run will continue from, and the experiment as it continues from there: itself where there is none.

    Warns of checkpoints that are skipped.

    Args:
        force: continue with whatever the configuration says now.

    Raises:
        ConfigError: `checkpoint.load` leads nowhere, the checkpoint is of another model, there is nothing left to train,
            or keys have changed that decide what is trained.
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
            f"checkpoint.load: '{found[0].path}' is of step {record.step} and steps is {experiment.steps}: "
            "nothing is left to train; raise steps"
        )
    return experiment.continuing(record), found[0]


def fit_continuing(
    experiment: Experiment, run_dir: Path, workers: int, *, force: bool = False
) -> tuple[Experiment, Stored | None]:
    """`continuing`, and `fit` of what comes out of it."""
    found, stored = continuing(experiment, run_dir, force=force)
    try:
        fit(found, workers)
    except Incompatible as error:
        if found.global_batch == experiment.global_batch:
            raise
        raise Incompatible(
            f"{error}\n  (global_batch is null: it stays what it was up to the checkpoint, {found.global_batch})"
        ) from None
    return found, stored


def _refuse_changes(record: Record, experiment: Experiment, run_dir: Path) -> None:
    """Raise ConfigError that names every key that must not have changed since the checkpoint was written."""
    before, now = _with_defaults(record.config), experiment.model_dump(mode="json")
    changed = [each for each in differences(before, now) if not each[0].startswith(MAY_CHANGE)]
    if not changed:
        return
    lines = [f"  {key}: was {_shown(old)}, is {_shown(new)}" for key, old, new in changed]
    raise ConfigError(
        "\n".join(
            [
                f"The configuration is not the one that the checkpoint of step {record.step} was written with:",
                *lines,
                f"`meshrunner resume {run_dir} --force` continues with the new values; a new run takes a new directory",
            ]
        )
    )


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A recorded configuration with the keys that are younger than it: it was trained as their defaults say."""
    try:
        return check(config).model_dump(mode="json")
    except ConfigError:
        return config


def _shown(value: Any) -> str:
    return "absent" if value is ... else repr(value)


def more_to_train(experiment: Experiment, run_dir: Path, trained: int) -> bool:
    """
    Whether a completed run has got more steps since.

    Args:
        trained: steps that it has completed.

    Raises:
        ConfigError: it has, but there is nothing to continue from.
    """
    if experiment.steps <= trained:
        return False
    if not good(run_dir / FOLDER)[0]:
        raise ConfigError(
            f"{run_dir} is completed with {trained} steps and holds no good checkpoint to continue from up to step "
            f"{experiment.steps}; for a new run choose another hydra.run.dir"
        )
    return True

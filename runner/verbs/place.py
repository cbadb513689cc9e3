"""`meshrunner place`: write run directories, start nothing."""

from __future__ import annotations

from meshrunner.runner.config.compose import Composed, Composer, parse
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.from_checkpoint import fit_continuing
from meshrunner.runner.rundir import run as run_directory
from meshrunner.runner.sweep.combinations import ConfiguredTarget
from meshrunner.runner.sweep.launcher import run_sweep


def place(arguments: list[str]) -> int:
    """The exit status."""
    composer = Composer(parse("place", [*arguments, "hydra/launcher=place"]))
    if composer.answer():
        return 0
    composed = composer.one()
    return run_sweep(composer) if composed is None else _place_one(composed)


def _place_one(composed: Composed) -> int:
    experiment = check(composed.config)
    fit_continuing(experiment, composed.run_dir, ConfiguredTarget().workers(experiment))
    run_directory.place(composed.config, composed.run_dir, composed.overrides)
    print(f"run directory: {composed.run_dir}")
    return 0

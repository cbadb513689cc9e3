"""`meshrunner place`: write run directories, start nothing."""

from __future__ import annotations

from meshrunner.runner.config.compose import Composed, Composer
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.from_checkpoint import fit_continuing
from meshrunner.runner.config.hydra.overrides import parse
from meshrunner.runner.console import say
from meshrunner.runner.rundir import place_run
from meshrunner.runner.sweep.combinations import configured_workers
from meshrunner.runner.sweep.hydra_launchers import run_sweep
from meshrunner.runner.sweep.preflight import predict_single_run
from meshrunner.runner.verbs.reference.queries import answered


def place(arguments: list[str]) -> int:
    """Place a run or a sweep; raises ConfigError as `run` does."""
    composer = Composer(parse("place", [*arguments, "hydra/launcher=place"]))
    if answered(composer):
        return 0
    composed = composer.single_run()
    return run_sweep(composer) if composed is None else _place_one(composed)


def _place_one(composed: Composed) -> int:
    experiment = check(composed.config)
    workers = configured_workers(experiment)
    fit_continuing(experiment, composed.run_dir, workers)
    plan = predict_single_run(composed.config, experiment, workers, here=False)
    place_run(composed.config, composed.run_dir, composed.overrides, plan)
    say(f"run directory: {composed.run_dir}")
    return 0

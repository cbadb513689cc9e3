"""`meshrunner place`: write run directories without starting any run."""

from collections.abc import Callable
from typing import Any

from meshrunner.runner.config.compose import Composed, Composer
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.resumable import fit_continuing
from meshrunner.runner.console import naming, say
from meshrunner.runner.rundir import place_run
from meshrunner.runner.sweep.combinations import configured_workers
from meshrunner.runner.sweep.hydra_launchers import run_sweep
from meshrunner.runner.sweep.preflight import predict_single_run
from meshrunner.runner.verbs.reference.queries import answered


def place(arguments: list[str]) -> int:
    """Write the directory of a run or sweep. Raise ConfigError if the configuration is invalid."""
    composer = Composer("place", [*arguments, "hydra/launcher=place"])
    if answered(composer):
        return 0
    composed = composer.single_run()
    if composed is None:
        return run_sweep(composer)
    write_run(composed, configured_workers, here=False)
    say(f"run directory: {composed.run_dir}")
    return 0


def write_run(
    composed: Composed, workers_of: Callable[[Experiment], int], *, here: bool, dry_run: bool = False
) -> tuple[Experiment, dict[str, Any]]:
    """Check a run and, unless `dry_run`, write its directory. Return the experiment and the content of plan.json. If the run
    does not start on this machine at once (`here` is false), also predict the run."""
    with naming("checking the configuration"):
        experiment = check(composed.config)
        workers = workers_of(experiment)
        fit_continuing(experiment, composed.run_dir, workers)
    plan = {}
    if not here:
        with naming("predicting memory and speed"):
            plan = predict_single_run(composed.config, experiment, workers, here=False)
    if not dry_run:
        place_run(composed.config, composed.run_dir, composed.overrides, plan)
    return experiment, plan

"""`meshrunner place`: write run directories without starting any run."""

from collections.abc import Callable
from typing import Any

from meshrunner.runner.config.compose import Composed, Composer
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.hydra.overrides import parse
from meshrunner.runner.config.resumable import fit_continuing
from meshrunner.runner.console import naming, say
from meshrunner.runner.rundir import place_run
from meshrunner.runner.sweep.combinations import configured_workers
from meshrunner.runner.sweep.hydra_launchers import run_sweep
from meshrunner.runner.sweep.preflight import predict_single_run
from meshrunner.runner.verbs.reference.queries import answered


def place(arguments: list[str]) -> int:
    """Write the directory of a run or sweep. Raise ConfigError if the configuration is invalid."""
    composer = Composer(parse("place", [*arguments, "hydra/launcher=place"]))
    if answered(composer):
        return 0
    composed = composer.single_run()
    if composed is None:
        return run_sweep(composer)
    _, plan = checked(composed, configured_workers, here=False)
    place_run(composed.config, composed.run_dir, composed.overrides, plan)
    say(f"run directory: {composed.run_dir}")
    return 0


def checked(
    composed: Composed, workers_of: Callable[[Experiment], int], *, here: bool
) -> tuple[Experiment, dict[str, Any]]:
    """Check and predict a run. Return its Experiment and the content of plan.json. `here`: whether it starts on this machine."""
    with naming("checking the configuration"):
        experiment = check(composed.config)
        workers = workers_of(experiment)
        fit_continuing(experiment, composed.run_dir, workers)
    return experiment, predict_single_run(composed.config, experiment, workers, here=here)

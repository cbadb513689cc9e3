"""`meshrunner run`: train one run or, with -m, every combination of a sweep."""

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

from meshrunner.runner.console import naming
from meshrunner.runner.process.receipt import record

HYDRA_QUERIES = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i")


def run(arguments: list[str]) -> int:
    """Execute a run or sweep. If the configuration is invalid, raise ConfigError before any run starts."""
    asks = any(argument.startswith(HYDRA_QUERIES) for argument in arguments)
    if not asks:
        from meshrunner.runner.process.forkserver import warm
        from meshrunner.runner.process.signals import hold_stop_requests

        warm()  # start early: the forkserver imports torch while this process composes the configuration
        hold_stop_requests()
    gc.disable()  # imports create little garbage; collecting it would slow down the forkserver
    with nullcontext() if asks else naming("composing the configuration"):
        from meshrunner.runner.config.compose import Composer
        from meshrunner.runner.verbs.reference.queries import answered

        composer = Composer("run", arguments)
        if answered(composer):
            return 0
        composed = composer.single_run()
    if composed is None:
        _collect_again()
        from meshrunner.runner.sweep.hydra_launchers import run_sweep

        return run_sweep(composer)
    record("folder", composed.run_dir)
    if str(composed.launcher["_target_"]).endswith(".SlurmLauncher"):
        from meshrunner.runner.verbs.launching.submit import submit_one

        return submit_one(composed)
    from meshrunner.runner.config.devices import expected_device_type
    from meshrunner.runner.launch.nodes import workers_here
    from meshrunner.runner.sweep.preflight import save_prediction
    from meshrunner.runner.verbs.launching.place import write_run

    experiment, _ = write_run(composed, workers_here, here=True)
    in_its_interpreter(composed.run_dir)
    warm(experiment.launch.env)  # before any child process starts, because `warm` may replace the forkserver
    predicted = composed.run_dir, composed.config, experiment, workers_here(experiment)
    prediction = Thread(target=save_prediction, args=predicted, daemon=True)
    prediction.start()
    _collect_again()
    # On a CPU, the prediction would slow down workers on the same cores. An emulated rank needs the prediction.
    if expected_device_type(experiment.hardware) == "cpu" or experiment.launch.emulate is not None:
        with naming("predicting memory and speed"):
            prediction.join()
    return execute_and_report(composed.run_dir, prediction=prediction)


def _collect_again() -> None:
    """Enable garbage collection again, except for existing objects, because the process may run for days."""
    gc.freeze()
    gc.enable()


def in_its_interpreter(run_dir: Path, *, force: bool = False) -> None:
    """If another interpreter executes the run (`launch.python`), replace this process by that interpreter, which then
    predicts the run."""
    from meshrunner.runner.config.experiment import check
    from meshrunner.runner.config.interpreter import VARIABLE, continue_in
    from meshrunner.runner.launch.nodes import workers_here
    from meshrunner.runner.rundir import read_config
    from meshrunner.runner.rundir.files import PLAN
    from meshrunner.runner.sweep.preflight import save_prediction

    config = read_config(run_dir)
    if not (python := config.get("launch", {}).get("python")):
        return
    continue_in(python, ["resume", str(run_dir), *["--force"] * force])
    if VARIABLE in os.environ and not (run_dir / PLAN).exists():
        experiment = check(config)
        save_prediction(run_dir, config, experiment, workers_here(experiment))


def execute_and_report(run_dir: Path, *, force: bool = False, prediction: Thread | None = None) -> int:
    """Execute the run in a directory, print the result, and return the exit status. `execute` explains the arguments."""
    from meshrunner.runner.launch.execute import execute
    from meshrunner.runner.launch.outcome import exit_status
    from meshrunner.runner.launch.report import report

    outcome, summary = execute(run_dir, force=force, prediction=prediction)
    report(run_dir, outcome, summary)
    return exit_status(outcome.state)

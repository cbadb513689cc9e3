"""Execute a run directory: claim it, prepare the data, launch the workers and record the outcome."""

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Thread

from meshrunner.recipes.checkpoint.on_disk import FOLDER, candidates
from meshrunner.recipes.errors import ConfigError, Interrupted, Moved
from meshrunner.runner.config.consistency import remarks
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.resumable import fit_continuing
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.launch.data import prepare_data, refuse_other_data
from meshrunner.runner.launch.environment import environment, resolved, worker_environment
from meshrunner.runner.launch.nodes import Peers, this_node
from meshrunner.runner.launch.outcome import Outcome, write_error
from meshrunner.runner.launch.preemption import Preemption
from meshrunner.runner.launch.progress import Display, ProgressLine
from meshrunner.runner.launch.workers import Attempt, launch
from meshrunner.runner.process.forkserver import warm
from meshrunner.runner.process.signals import INTERRUPTS, blocked, interruptible
from meshrunner.runner.process.worker_context import Node
from meshrunner.runner.rundir import Status, Summary, claim, heartbeat, read_config, update_status, write_summary
from meshrunner.runner.rundir.files import CONFIG, ENVIRONMENT, ERROR
from meshrunner.runner.trackers.handle import Trackers

_executions = count()


def execute(
    run_dir: Path, *, force: bool = False, display: Display | None = None, prediction: Thread | None = None
) -> tuple[Outcome, Summary | None]:
    """Execute a run directory and record the outcome. Return the outcome and, on the first node, the summary. If `force` is true,
    resume even if settings that affect the result have changed. Before writing the summary, wait for the thread `prediction`,
    which writes plan.json. Raise ConfigError for wrong settings, and AlreadyRunning if another process executes the run."""
    config = read_config(run_dir)
    try:
        experiment = check(config)
    except ConfigError as wrong:
        raise ConfigError(f"{run_dir / CONFIG}:\n{wrong}") from None
    warm(experiment.launch.env)  # do this first: it replaces a forkserver that was started without these variables
    if (node := this_node(experiment.launch.nodes_used)).rank > 0:
        return _execute_other_node(run_dir, experiment, node), None
    if display is None:
        say(f"run directory: {shown(run_dir)}")
    devices = node_devices(experiment)
    experiment = experiment.on(devices.type)
    continued, stored = fit_continuing(experiment, run_dir, devices.workers, force=force)
    same_data = stored is not None and stored.path.parent == run_dir / FOLDER and not force
    done = stored.record.step if stored is not None else 0
    for remark in (*remarks(experiment), *experiment.profiler.remarks(experiment.profiled, devices.type, done)):
        warn(remark)
    status: Status | None = None
    tracking: Trackers | None = None
    shows = display or ProgressLine(experiment.steps, run_dir)
    preemption, peers = Preemption(run_dir, saves=experiment.checkpoint.saves), Peers(run_dir, node)
    with interruptible(), preemption, peers:

        def run() -> Outcome:
            nonlocal status, tracking
            with blocked(INTERRUPTS):
                status = claim(run_dir)
            if stored is not None:
                say(f"{shows.whose(run_dir)}the run continues after step {done}, from {stored.path}")
            elif status.attempt > 1:
                say(f"{shows.whose(run_dir)}the run starts again at step 1: there is no checkpoint")
            (run_dir / ERROR).unlink(missing_ok=True)
            tracking = Trackers(run_dir, experiment.tracker) if experiment.launch.emulate is None else None
            attempt = Attempt(run_dir, experiment, devices, status.attempt, peers, preemption)
            alive = heartbeat(lambda: update_status(run_dir, heartbeat=time.time()))
            with alive, shows if isinstance(shows, ProgressLine) else nullcontext():
                return _prepare_and_launch(attempt, continued, shows, same_data=same_data)

        outcome, error = _outcome(run)
        if status is None and error is not None:
            raise error
        outcome = replace(peers.agree_on_outcome(outcome), interrupted=preemption.interrupted)
        summary = _record(run_dir, experiment, outcome, prediction, cold=next(_executions) == 0)
        if tracking:
            tracking.finish_or_warn(f"the run is {outcome.state}")
    if not run_dir.is_dir():
        raise Moved(
            f"{run_dir} was moved or removed during the run. If it was moved, continue with `meshrunner resume NEW_PATH`."
        )
    if isinstance(error, Interrupted):
        raise Interrupted(f"{error}; `meshrunner resume {run_dir}` {_resumes(run_dir, experiment)}")
    if error is not None:
        raise error
    return outcome, summary


def _resumes(run_dir: Path, experiment: Experiment) -> str:
    with suppress(ConfigError):  # raised if `checkpoint.load` names no checkpoint
        found, _ = candidates(experiment.checkpoint.load, run_dir / FOLDER)
        if found:
            return f"continues the run after step {found[0].record.step}"
    return "starts the run again at step 1: there is no checkpoint"


def _execute_other_node(run_dir: Path, experiment: Experiment, node: Node) -> Outcome:
    """Run the workers of a node other than the first. The first node records the run, including failures on other nodes."""
    saves = experiment.checkpoint.saves
    with interruptible(), Preemption(run_dir, saves=saves) as preemption, Peers(run_dir, node) as peers:

        def run() -> Outcome:
            devices = node_devices(experiment)
            # The attempt number 0 is a placeholder. Only rows contain the number, and only the first node writes rows.
            attempt = Attempt(run_dir, experiment.on(devices.type), devices, 0, peers, preemption)
            with prepare_data(experiment, run_dir, devices.workers):
                return launch(attempt, lambda _: None)

        outcome, error = _outcome(run)
        outcome = peers.agree_on_outcome(outcome)
        peers.wait_for_first_node()
    if error is not None:
        raise error
    return outcome


def _outcome(run: Callable[[], Outcome]) -> tuple[Outcome, BaseException | None]:
    """Call `run` and return its outcome and None. If `run` raises an exception, return the exception, and an outcome whose
    state is `failed` or `interrupted`."""
    try:
        return run(), None
    except Interrupted as error:
        return Outcome("interrupted", str(error)), error
    except Exception as error:
        return Outcome("failed", str(error) or type(error).__name__), error


def _prepare_and_launch(attempt: Attempt, continued: Experiment, display: Display, *, same_data: bool) -> Outcome:
    """Write environment.json, prepare the data, launch the workers and return the outcome. `continued`: the experiment with a
    null `global_batch` replaced (see `fit_continuing`). Raise ConfigError if `same_data` is true and the data has changed since
    the run last trained."""
    run_dir, experiment, devices = attempt.run_dir, attempt.experiment, attempt.devices
    record = environment(devices, experiment.launch.env, worker_environment(experiment, devices.type))
    (record | {"resolved": resolved(continued, devices)}).write(run_dir / ENVIRONMENT)
    with prepare_data(continued, run_dir, devices.workers, display.refresh):
        if same_data:
            refuse_other_data(experiment, run_dir)
        return launch(attempt, display.refresh)


def _record(
    run_dir: Path, experiment: Experiment, outcome: Outcome, prediction: Thread | None, *, cold: bool
) -> Summary:
    """Write the run's final state and summary, and return the summary. Warn if a file cannot be written."""
    if prediction is not None and outcome.state != "interrupted":
        with suppress(Interrupted):  # Ctrl-C ends the wait; the run has ended already
            prediction.join()
    with blocked(INTERRUPTS):
        write_error(run_dir, outcome)
        try:
            status = update_status(run_dir, state=outcome.state, reason=outcome.reason, ended=time.time())
            return write_summary(run_dir, experiment.measure_after, status, cold=cold)
        except OSError as error:
            warn(f"cannot write the state '{outcome.state}' to {run_dir}: {error.strerror}")
            return Summary(state=outcome.state, reason=outcome.reason)

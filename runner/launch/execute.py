"""Execution of a run directory: claim, prepare, launch, record. The local launcher, `resume` and SLURM all use it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.checkpoint.on_disk import FOLDER, StoredCheckpoint, candidates
from meshrunner.recipes.errors import ConfigError, Interrupted, Moved
from meshrunner.runner.config.devices import NodeDevices, node_devices
from meshrunner.runner.config.experiment import Experiment, check, remarks
from meshrunner.runner.config.from_checkpoint import fit_continuing
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.launch.data import prepare_data, refuse_other_data
from meshrunner.runner.launch.environment import environment, resolved, worker_environment
from meshrunner.runner.launch.failure import write_error
from meshrunner.runner.launch.nodes import Peers, this_node
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.launch.preemption import Preemption
from meshrunner.runner.launch.progress import Display, ProgressLine
from meshrunner.runner.launch.workers import Attempt, launch
from meshrunner.runner.process.forkserver import warm
from meshrunner.runner.process.signals import INTERRUPTS, blocked, interruptible
from meshrunner.runner.process.worker_context import Node
from meshrunner.runner.rundir import (
    Location,
    Status,
    Summary,
    claim,
    heartbeat,
    read_config,
    update_status,
    write_summary,
)
from meshrunner.runner.rundir.files import CONFIG, ENVIRONMENT, ERROR
from meshrunner.runner.trackers.handle import Trackers

_executions = count()
"""Runs that this process has executed."""


class Executed(NamedTuple):
    """An executed run."""

    run_dir: Path
    """Where it is now."""
    outcome: Outcome
    summary: Summary | None
    """None on all nodes but the first."""


def execute(run_dir: Path, *, force: bool = False, display: Display | None = None) -> Executed:
    """
    Execute a run directory and record its outcome.

    Args:
        force: continue from a checkpoint although keys have changed that affect what is trained.
        display: shows the run as one of several; None: it is shown by itself, its directory first.

    Raises:
        ConfigError: the configuration does not fit this node or its data; nothing was started.
        AlreadyRunning: another process executes the directory.
        Interrupted: by the user; the workers are gone and the state is recorded.
        Moved: the directory was moved before the workers had started.
    """
    experiment = _configuration(run_dir)
    warm(experiment.launch.env)  # before anything is started: it replaces a forkserver that was started without
    node = this_node(experiment.launch.nodes)
    if node.rank > 0:
        return Executed(run_dir, _execute_other_node(run_dir, experiment, node), None)
    if display is None:
        say(f"run directory: {shown(run_dir)}")
    devices = node_devices(experiment)
    experiment = experiment.on(devices.type)
    continued, stored = fit_continuing(experiment, run_dir, devices.workers, force=force)
    _print_remarks(experiment, devices, stored)
    status: Status | None = None
    tracking: Trackers | None = None
    with ExitStack() as stack:
        location = stack.enter_context(Location(run_dir))
        stack.enter_context(interruptible())
        preemption = stack.enter_context(Preemption(run_dir, saves=experiment.checkpoint.saves))
        shows = display or ProgressLine(experiment.steps, run_dir)
        peers = stack.enter_context(Peers(run_dir, node))

        def run() -> Outcome:
            nonlocal status, tracking
            with blocked(INTERRUPTS):
                status = claim(run_dir)
            if stored is not None:
                say(f"{shows.whose(run_dir)}continues after step {stored.record.step}, from {stored.path}")
            elif status.attempt > 1:
                say(f"{shows.whose(run_dir)}begins again at step 1: there is no checkpoint")
            (run_dir / ERROR).unlink(missing_ok=True)
            tracking = Trackers.start(run_dir, experiment.tracker)
            attempt = Attempt(run_dir, experiment, devices, status.attempt, peers, preemption)
            with heartbeat(run_dir):
                variables = worker_environment(experiment, devices.type)
                record = environment(devices, experiment.launch.env, variables)
                record |= {"resolved": resolved(continued, devices)}
                record.write(run_dir / ENVIRONMENT)
                own = stored is not None and stored.path.parent == run_dir / FOLDER
                with shows if isinstance(shows, ProgressLine) else nullcontext():
                    return _prepare_and_launch(attempt, shows, same_data=own and not force)

        outcome, error = _outcome(run)
        if status is None:
            assert error is not None
            raise error
        outcome = replace(peers.agree_on_outcome(outcome), interrupted=preemption.interrupted)
        run_dir, outcome = _found(location, outcome)
        with blocked(INTERRUPTS):
            summary = _record(run_dir, experiment, outcome, cold=next(_executions) == 0)
        if tracking is not None:
            tracking.finish_or_warn(f"the run is {outcome.state}")
    if isinstance(error, Interrupted):
        raise Interrupted(f"{error}; `meshrunner resume {run_dir}` {_resumes(run_dir, experiment)}")
    if isinstance(error, OSError) and run_dir != location.path:
        raise Moved(outcome.reason) from error
    if error is not None:
        raise error
    return Executed(run_dir, outcome, summary)


def _found(location: Location, outcome: Outcome) -> tuple[Path, Outcome]:
    """Where the run directory is now, and the outcome, which may be the consequence of its being moved."""
    run_dir = location.now()
    if run_dir == location.path:
        return run_dir, outcome
    what = "was removed" if run_dir is None else f"was moved to {run_dir}"
    what = f"the run directory {what} while the run went on"
    if run_dir is not None and outcome.state in ("completed", "interrupted"):
        warn(what)
        return run_dir, outcome
    reason = what if outcome.state == "completed" else f"{what} ({outcome.reason})"
    return run_dir or location.path, replace(outcome, state="failed", reason=reason)


def _resumes(run_dir: Path, experiment: Experiment) -> str:
    """Where `meshrunner resume` takes the run up."""
    with suppress(ConfigError):  # `checkpoint.load` names none
        found, _ = candidates(experiment.checkpoint.load, run_dir / FOLDER)
        if found:
            return f"continues it after step {found[0].record.step}"
    return "begins it again at step 1: there is no checkpoint"


def _execute_other_node(run_dir: Path, experiment: Experiment, node: Node) -> Outcome:
    """Execute the part of every node but the first: its workers. The first node records the run, failures here included."""
    saves = experiment.checkpoint.saves
    with interruptible(), Preemption(run_dir, saves=saves) as preemption, Peers(run_dir, node) as peers:

        def run() -> Outcome:
            devices = node_devices(experiment)
            # Only the first node writes rows, which hold the number of the attempt.
            attempt = Attempt(run_dir, experiment.on(devices.type), devices, 0, peers, preemption)
            with prepare_data(experiment, run_dir):
                return launch(attempt, started=lambda workers: peers.publish(workers=workers), poll=lambda _: None)

        outcome, error = _outcome(run)
        outcome = peers.agree_on_outcome(outcome)
        peers.wait_for_first_node()
    if error is not None:
        raise error
    return outcome


def _outcome(run: Callable[[], Outcome]) -> tuple[Outcome, BaseException | None]:
    """Return the outcome of a node's part, and the exception to raise once it is recorded."""
    try:
        return run(), None
    except (Interrupted, Exception) as error:
        return Outcome.from_error(error), error


def _prepare_and_launch(attempt: Attempt, display: Display, *, same_data: bool) -> Outcome:
    """
    Return the outcome of an attempt, from preparing its data on.

    Args:
        same_data: refuse data that is not what the run was trained on so far.
    """
    run_dir = attempt.run_dir

    def started(workers: list[dict[str, int]]) -> None:
        update_status(run_dir, workers=workers)
        attempt.peers.publish(workers=workers)

    with prepare_data(attempt.experiment, run_dir, display.refresh):
        if same_data:
            refuse_other_data(attempt.experiment, run_dir)
        return launch(attempt, started=started, poll=display.refresh)


def _configuration(run_dir: Path) -> Experiment:
    try:
        return check(read_config(run_dir))
    except ConfigError as error:
        raise ConfigError(f"{run_dir / CONFIG}:\n{error}") from None


def _print_remarks(experiment: Experiment, devices: NodeDevices, stored: StoredCheckpoint | None) -> None:
    done = stored.record.step if stored is not None else 0
    for remark in [*remarks(experiment), *experiment.profiler.remarks(experiment.profiled, devices.type, done)]:
        warn(remark)


def _record(run_dir: Path, experiment: Experiment, outcome: Outcome, *, cold: bool) -> Summary:
    """Write the final state and the summary, and return the summary. On a full disk, only warn."""
    write_error(run_dir, outcome)
    try:
        status = update_status(run_dir, state=outcome.state, reason=outcome.reason, ended=time.time())
        return write_summary(run_dir, experiment.measure_after, status, cold=cold)
    except OSError as error:
        warn(f"the state '{outcome.state}' could not be written to {run_dir}: {error.strerror}")
        return Summary(state=outcome.state, reason=outcome.reason)

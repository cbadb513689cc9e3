"""Executing a run directory: claim, prepare, launch, record. The local launcher, `resume` and SLURM all do it this way."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError, Interrupted
from meshrunner.runner.config.devices import NodeDevices, node_devices
from meshrunner.runner.config.experiment import check, remarks
from meshrunner.runner.config.from_checkpoint import fit_continuing
from meshrunner.runner.console import warn
from meshrunner.runner.launch.data import data_prepared
from meshrunner.runner.launch.environment import environment
from meshrunner.runner.launch.failure import write_error
from meshrunner.runner.launch.nodes import Peers, this_node
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.launch.preemption import Preemption
from meshrunner.runner.launch.progress import ProgressLine
from meshrunner.runner.launch.workers import Attempt, launch
from meshrunner.runner.process.signals import interruptible, interrupts_held
from meshrunner.runner.rundir.events import Tail
from meshrunner.runner.rundir.files import CONFIG, ENVIRONMENT, ERROR, EVENTS, write_json
from meshrunner.runner.rundir.owner import claim, heartbeat
from meshrunner.runner.rundir.run import read_config
from meshrunner.runner.rundir.states import update_status
from meshrunner.runner.rundir.summary import write_summary
from meshrunner.runner.trackers.handle import TrackerHandle

if TYPE_CHECKING:
    from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint
    from meshrunner.runner.config.experiment import Experiment
    from meshrunner.runner.process.worker_context import Node


def execute(
    run_dir: Path, *, force: bool = False, poll: Callable[[], None] | None = None
) -> tuple[Outcome, dict[str, Any]]:
    """
    Run what a directory says and record how it ended; returns that and the summary ({} on all nodes but the first).

    Args:
        force: continue from a checkpoint though keys have changed that decide what is trained.
        poll: called a few times a second, by one who shows the progress; None: it is shown here.

    Raises:
        ConfigError: the configuration does not fit this node or its data; nothing was started.
        AlreadyRunning: another process executes the directory.
        Interrupted: by the user, after everything was ended and recorded.
    """
    experiment = _configuration(run_dir)
    node = this_node(experiment.launch.nodes)
    if node.rank > 0:
        return _execute_part(run_dir, experiment, node), {}
    devices = node_devices(experiment)
    _, stored = fit_continuing(experiment, run_dir, devices.workers, force=force)
    _warn(experiment, devices, stored)
    status: dict[str, Any] | None = None
    tracking: TrackerHandle | None = None
    with interruptible(), Preemption(run_dir) as preemption, Peers(run_dir, node) as peers:

        def run() -> Outcome:
            nonlocal status, tracking
            with interrupts_held():
                status = claim(run_dir)
            if stored is not None:
                print(f"continues after step {stored.record.step}, from {stored.path}", flush=True)
            (run_dir / ERROR).unlink(missing_ok=True)
            tracking = TrackerHandle.start(run_dir, experiment.tracker)
            attempt = Attempt(run_dir, experiment, devices, status["attempt"], peers, preemption)
            with heartbeat(run_dir):
                write_json(run_dir / ENVIRONMENT, environment(devices, experiment.launch.env))
                return _train(attempt, poll)

        outcome, error = _outcome(run)
        if status is None:
            assert error is not None
            raise error
        outcome = peers.agree(outcome)
        with interrupts_held():
            summary = _record(run_dir, experiment, outcome)
        if tracking is not None:
            tracking.finish_or_warn(f"the run is {outcome.state}")
    if isinstance(error, Interrupted):
        raise Interrupted(f"{error}; `meshrunner resume {run_dir}` continues it")
    if error is not None:
        raise error
    return outcome, summary


def _execute_part(run_dir: Path, experiment: Experiment, node: Node) -> Outcome:
    """What every node but the first does: its workers. The record is the first node's, which hears what is wrong here."""
    with interruptible(), Preemption(run_dir) as preemption, Peers(run_dir, node) as peers:

        def run() -> Outcome:
            # The rows, and so the number of the attempt, are the first node's.
            attempt = Attempt(run_dir, experiment, node_devices(experiment), 0, peers, preemption)
            with data_prepared(experiment, run_dir):
                return launch(attempt, started=lambda workers: peers.say(workers=workers), poll=lambda: None)

        outcome, error = _outcome(run)
        outcome = peers.agree(outcome)
        peers.wait_for_head()
    if error is not None:
        raise error
    return outcome


def _outcome(run: Callable[[], Outcome]) -> tuple[Outcome, BaseException | None]:
    """How a node's part ended, and what is to be raised once that is recorded."""
    try:
        return run(), None
    except (Interrupted, Exception) as error:
        return Outcome.of(error), error


def _train(attempt: Attempt, poll: Callable[[], None] | None) -> Outcome:
    run_dir = attempt.run_dir

    def started(workers: list[dict[str, int]]) -> None:
        update_status(run_dir, workers=workers)
        attempt.peers.say(workers=workers)

    with data_prepared(attempt.experiment, run_dir):
        if poll is not None:
            return launch(attempt, started=started, poll=poll)
        tail = Tail(run_dir / EVENTS)
        tail.read()  # rows of earlier attempts
        with ProgressLine(attempt.experiment.steps) as progress:
            return launch(attempt, started=started, poll=lambda: progress.show(tail.read()))


def _configuration(run_dir: Path) -> Experiment:
    try:
        return check(read_config(run_dir))
    except ConfigError as error:
        raise ConfigError(f"{run_dir / CONFIG}:\n{error}") from None


def _warn(experiment: Experiment, devices: NodeDevices, stored: StoredCheckpoint | None) -> None:
    done = stored.record.step if stored is not None else 0
    for remark in [*remarks(experiment), *experiment.profiler.remarks(experiment.profiled, devices.type, done)]:
        warn(remark)


def _record(run_dir: Path, experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Write the final state and the summary. On a full disk the run has still ended, so that is said and no more."""
    write_error(run_dir, outcome)
    try:
        status = update_status(run_dir, state=outcome.state, reason=outcome.reason, ended=time.time())
        return write_summary(run_dir, experiment.measure_after, status)
    except OSError as error:
        warn(f"the state '{outcome.state}' could not be written to {run_dir}: {error.strerror}")
        return {"state": outcome.state, "reason": outcome.reason}

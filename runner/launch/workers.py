"""Start the workers of a run on this node and wait until they end. The launcher does not import torch. Torch elastic is not
used: if a rank ran out of memory, torch elastic would report another rank's "connection closed by peer" instead."""

import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from meshrunner.recipes.checkpoint.on_disk import FOLDER, TEMPORARY
from meshrunner.recipes.errors import Interrupted
from meshrunner.recipes.meter import EVALUATING, PHASES, Phase
from meshrunner.runner.config.devices import NodeDevices, too_few_cores
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.console import warn
from meshrunner.runner.launch import worker
from meshrunner.runner.launch.environment import worker_environment
from meshrunner.runner.launch.nodes import Peers
from meshrunner.runner.launch.outcome import Outcome, first_failure, hang, oom_kills
from meshrunner.runner.launch.preemption import Preemption
from meshrunner.runner.launch.worker import STOPPED_EARLY
from meshrunner.runner.measure.evaluations import reason_to_end
from meshrunner.runner.process import forkserver
from meshrunner.runner.process.network import gloo_interface
from meshrunner.runner.process.signals import first_interrupt
from meshrunner.runner.process.worker_context import SharedIntegers, WorkerContext
from meshrunner.runner.rundir import started_at, update_status
from meshrunner.runner.rundir.files import rank_error, rank_log

FAILURE_GRACE_S = 2.0
"""Seconds to wait after the first failure, so that other ranks can report their own failures."""
KILL_AFTER_S = 5.0
"""Seconds between END_SIGNAL and SIGKILL, in which workers can end by themselves."""
POLL_S = 0.1


@dataclass(frozen=True)
class Attempt:
    """One execution of a run directory, on one node."""

    run_dir: Path
    experiment: Experiment
    """Experiment as configured, without values from a checkpoint, because each worker reads the checkpoint itself."""
    devices: NodeDevices
    number: int
    """Number of this execution of the run directory, counted from 1."""
    peers: Peers
    preemption: Preemption

    @property
    def first_rank(self) -> int:
        """Rank of this node's first worker."""
        emulated = self.experiment.launch.emulate
        return self.peers.node.rank * self.devices.workers if emulated is None else emulated


def launch(attempt: Attempt, poll: Callable[[str], object]) -> Outcome:
    """Start this node's workers, wait until they end or another node fails, and return the outcome that this node sees. A few
    times a second, call `poll` with the current phase of this node's first worker, such as "building the model" (see
    `recipes.meter.Phase`). If the user presses Ctrl-C, end the workers and raise Interrupted."""
    run_dir, first = attempt.run_dir, attempt.first_rank
    steps, phase = SharedIntegers(attempt.devices.processes), SharedIntegers(1)

    def show_phase() -> Phase:
        poll(now := PHASES[phase[0]])
        return now

    show_phase()
    if remark := too_few_cores(attempt.devices):
        warn(remark)
    processes = _create_processes(attempt, steps, phase)
    oom_kills_before = oom_kills()
    try:
        try:
            for process in processes:
                process.start()
        except (OSError, EOFError) as error:
            return Outcome("failed", f"the workers could not be started: {error}")
        if attempt.peers.node.rank == 0:
            started = [{"rank": first + i, "pid": process.pid or 0} for i, process in enumerate(processes)]
            update_status(run_dir, workers=started)
        # Before the first completed step, there is no progress to save, so an interrupt stops the workers at once.
        with first_interrupt(lambda: any(steps) and attempt.preemption.interrupt()):
            stalled_minutes = _watch(attempt, processes, steps, show_phase)
        codes = [process.exitcode for process in processes]  # read these before `_terminate` changes them
    finally:
        _terminate(processes)
    if stalled_minutes is not None:
        return hang(run_dir, first, list(steps), stalled_minutes)
    failed = {first + i: code for i, code in enumerate(codes) if code and code != STOPPED_EARLY}
    if failed:
        return first_failure(run_dir, failed, killed_by_kernel=oom_kills() > oom_kills_before)
    if not any(code is None or code == STOPPED_EARLY for code in codes):
        return Outcome("completed", reason_to_end(run_dir, attempt.experiment))
    if attempt.preemption.interrupted:
        raise Interrupted("by SIGINT")
    if attempt.preemption.requested:
        return Outcome("preempted", attempt.preemption.reason)
    return Outcome("failed", "workers on another node have ended", collateral=True)


def _create_processes(attempt: Attempt, steps: SharedIntegers, phase: SharedIntegers) -> list[BaseProcess]:
    devices, node, launch = attempt.devices, attempt.peers.node, attempt.experiment.launch
    port = SharedIntegers(1)
    port[0] = launch.port or node.port
    environment = worker_environment(attempt.experiment, devices.type)
    if node.count > 1 and "GLOO_SOCKET_IFNAME" not in environment and (name := gloo_interface(environment, node.host)):
        environment["GLOO_SOCKET_IFNAME"] = name
    pickled = pickle.dumps(attempt.experiment)  # unpickled after the worker has set sys.path
    processes: list[BaseProcess] = []
    for local_rank in range(devices.processes):
        context = WorkerContext(
            rank=attempt.first_rank + local_rank,
            local_rank=local_rank,
            workers=devices.workers,
            node=replace(node, count=launch.nodes),
            emulated=devices.emulated,
            device_type=devices.type,
            threads=devices.threads,
            attempt=attempt.number,
            port=port,
            steps=steps,
            phase=phase,
            stop_requested=attempt.preemption.shared,
        )
        rank_error(attempt.run_dir, context.rank).unlink(missing_ok=True)
        log, variables = rank_log(attempt.run_dir, context.rank), environment | context.environment
        processes.append(forkserver.child(log, variables, worker.main, attempt.run_dir, pickled, context))
    return processes


def _watch(
    attempt: Attempt, processes: list[BaseProcess], steps: SharedIntegers, poll: Callable[[], Phase]
) -> float | None:
    """Wait until this node's workers end or must be killed. Return the time limit in minutes if a step exceeded it, else None."""
    settings, preemption = attempt.experiment.launch, attempt.preemption
    seen, since, saved_bytes = list(steps), time.monotonic(), 0
    failed_at: float | None = None
    while alive := [p for p in processes if p.exitcode is None]:
        wait([p.sentinel for p in alive], timeout=POLL_S)
        evaluating = poll() == EVALUATING
        preemption.poll()
        now = time.monotonic()
        failed_here = any(p.exitcode not in (0, STOPPED_EARLY, None) for p in processes)
        if failed_at is None and (failed_here or attempt.peers.failed_elsewhere()):
            failed_at = now
        if failed_at is not None and now - failed_at > FAILURE_GRACE_S:
            break
        if preemption.requested and not any(steps):
            break  # no progress to save, and the first step may take long
        if list(steps) != seen or evaluating:
            seen, since = list(steps), now
        minutes = settings.timeout_minutes if min(seen) else settings.start_timeout_minutes
        if failed_at is None and now - since > 60 * minutes:
            if (size := _unfinished_checkpoint_bytes(attempt.run_dir)) == saved_bytes:
                return minutes
            saved_bytes, since = size, now  # a slow save is progress
    poll()
    return None


def _unfinished_checkpoint_bytes(run_dir: Path) -> int:
    size = 0
    with suppress(FileNotFoundError):  # raised if the checkpoint is completed during the loop
        for path in (run_dir / FOLDER).glob(f"{TEMPORARY}*/*"):
            size += path.stat().st_size
    return size


def _terminate(processes: list[BaseProcess]) -> None:
    """Stop all running processes and wait for them. Use os.kill: Process.kill does nothing if the forkserver has died."""
    for name in (forkserver.END_SIGNAL, signal.SIGKILL):
        for process in processes:
            if process.pid is not None and _exists(process):
                os.kill(process.pid, name)
        deadline = time.monotonic() + KILL_AFTER_S
        while any(_exists(p) for p in processes) and time.monotonic() < deadline:
            time.sleep(0.01)


def _exists(process: BaseProcess) -> bool:
    if process.pid is None or (process.exitcode is not None and process.exitcode != 255):
        return False  # 255 may also mean that the forkserver, which reports exit codes, is gone
    return started_at(process.pid) is not None

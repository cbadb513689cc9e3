"""Run directory -> N workers on this node, watched until they end. Needs no torch in this process.

torch elastic is not used: once ranks are coupled by collectives it names a victim as the cause ("connection closed by
peer"), and an out-of-memory rank is reported as a network error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.cache import cache_dir
from runner import child, worker
from runner.blame import blame, late, oom_kills
from runner.outcome import Outcome
from runner.worker import LEFT, Seat, error_file

if TYPE_CHECKING:
    from runner.experiment import Experiment
    from runner.nodes import Node, Peers
    from runner.preemption import Preemption

GRACE_S = 2.0
"""After the first failure the other ranks may still say what they saw."""
END_S = 5.0
"""From the signal that writes a stack to SIGKILL."""
POLL_S = 0.1


def launch(
    run_dir: Path,
    experiment: Experiment,
    device: tuple[str, int, int],
    attempt: int,
    *,
    peers: Peers,
    preemption: Preemption,
    started: Callable[[list[dict[str, int]]], object],
    poll: Callable[[], None],
) -> Outcome:
    """
    Start this node's workers and wait for their end, or for trouble on another node.

    Args:
        experiment: as configured; the workers find out by themselves whether they continue from a checkpoint.
        device: what `runner.devices.resolve` found.
        attempt: number of this execution of the run directory.
        started: called once with the workers, each {"rank", "pid"}.
        poll: called a few times a second, to show progress.

    Returns:
        How the run ended, as far as this node can know.

    Raises:
        Interrupted: after the workers were ended.
    """
    steps = child.shared_integers(device[1])
    first = peers.node.rank * device[1]
    processes = _processes(run_dir, experiment, device, attempt, peers.node, steps, preemption)
    kills = oom_kills()
    try:
        try:
            for process in processes:
                process.start()
        except (OSError, EOFError) as error:
            return Outcome("failed", f"the workers could not be started: {error}")
        started([{"rank": first + i, "pid": process.pid or 0} for i, process in enumerate(processes)])
        waited = _watch(run_dir, processes, experiment, steps, peers, preemption, poll)
        codes = [process.exitcode for process in processes]  # before this process ends any of them
    finally:
        _end(processes)
    if waited is not None:
        return late(run_dir, first, list(steps), waited)
    failed = {first + i: code for i, code in enumerate(codes) if code not in (0, LEFT, None)}
    if failed:
        return blame(
            run_dir, {rank: code for rank, code in failed.items() if code}, killed_by_kernel=oom_kills() > kills
        )
    if not any(code is None or code == LEFT for code in codes):
        return Outcome("completed", "")
    if preemption.asked:
        return Outcome("preempted", preemption.reason)
    return Outcome("failed", "workers on another node have ended", collateral=True)


def _processes(
    run_dir: Path,
    experiment: Experiment,
    device: tuple[str, int, int],
    attempt: int,
    node: Node,
    steps: Any,
    preemption: Preemption,
) -> list[BaseProcess]:
    device_type, workers, threads = device
    settings, port = experiment.launch, child.shared_integers(1)
    port[0] = settings.port or node.port
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "inductor"),  # compiled code is shared by all runs
        **settings.env,
    }
    pickled = pickle.dumps(experiment)
    processes: list[BaseProcess] = []
    for local_rank in range(workers):
        rank = node.rank * workers + local_rank
        error_file(run_dir, rank).unlink(missing_ok=True)
        seat = Seat(rank, local_rank, workers, node, device_type, threads, attempt, port, steps, preemption.shared)
        arguments = (str(run_dir), pickled, seat, environment | seat.environment, sys.path)
        processes.append(child.context.Process(target=worker.main, args=arguments))
    return processes


def _watch(
    run_dir: Path,
    processes: list[BaseProcess],
    experiment: Experiment,
    steps: Any,
    peers: Peers,
    preemption: Preemption,
    poll: Callable[[], None],
) -> float | None:
    """
    Until all have ended, one here or on another node has failed (plus some grace), no step was completed for too long, or
    the run is asked to leave before its first step.

    Returns:
        The minutes that were waited for a step; None in the other cases.
    """
    settings = experiment.launch
    seen, since, saved = list(steps), time.monotonic(), 0
    failed_at: float | None = None
    while alive := [p for p in processes if p.exitcode is None]:
        wait([p.sentinel for p in alive], timeout=POLL_S)
        poll()
        preemption.look()
        now = time.monotonic()
        if failed_at is None and (any(p.exitcode not in (0, LEFT, None) for p in processes) or peers.trouble()):
            failed_at = now
        if failed_at is not None and now - failed_at > GRACE_S:
            break
        if preemption.asked and not any(steps):
            break  # nothing is lost, and the first step may be long in coming
        if list(steps) != seen:
            seen, since = list(steps), now
        minutes = settings.timeout_minutes if min(seen) else settings.start_timeout_minutes
        if failed_at is None and now - since > 60 * minutes:
            if (size := _being_saved(run_dir)) == saved:
                return minutes
            saved, since = size, now  # slow, but it goes on
    poll()
    return None


def _being_saved(run_dir: Path) -> int:
    """Bytes of the checkpoint that is being written."""
    size = 0
    for path in (run_dir / "checkpoints").glob(".tmp-*/*"):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def _end(processes: list[BaseProcess]) -> None:
    """End what still runs, and wait until it is gone. Processes are addressed by id: the forkserver may be gone, too."""
    for name in (child.END, signal.SIGKILL):
        for process in processes:
            if process.pid is not None and _exists(process):
                os.kill(process.pid, name)
        deadline = time.monotonic() + END_S
        while any(_exists(p) for p in processes) and time.monotonic() < deadline:
            time.sleep(0.01)


def _exists(process: BaseProcess) -> bool:
    if process.pid is None or (process.exitcode is not None and process.exitcode != 255):
        return False  # 255 also means that the forkserver, which reports exit codes, has gone
    stat = Path(f"/proc/{process.pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

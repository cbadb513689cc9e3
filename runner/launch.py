"""Run directory -> N workers on this node, watched until they end. Needs no torch in this process.

torch elastic is not used: once ranks are coupled by collectives it names a victim as the cause ("connection closed by
peer"), and an out-of-memory rank is reported as a network error.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.cache import cache_dir
from runner import child, worker
from runner.logs import last_stack
from runner.rundir import read_json, update_status, write_json
from runner.worker import Seat, error_file, shared_integers

if TYPE_CHECKING:
    from runner.experiment import Experiment

GRACE_S = 2.0
"""After the first failure the other ranks may still say what they saw."""
END_S = 5.0
"""From SIGTERM to SIGKILL."""
POLL_S = 0.1
COLLATERAL = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (refused|closed)|remote (worker|process)|timed out waiting|"
    r"NCCL.*(abort|remote)|Failed to recv|Socket",
    re.IGNORECASE,
)
"""What a rank says when another one has gone."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: str
    reason: str
    rank: int | None = None
    """The rank that failed first."""


class Interrupted(KeyboardInterrupt):
    """The user, or the system in their name, ended the run: Ctrl-C, SIGTERM, SIGHUP. No handler of errors may take it for one."""


def launch(
    run_dir: Path, experiment: Experiment, device: tuple[str, int, int], attempt: int, poll: Callable[[], None]
) -> Outcome:
    """
    Start the workers and wait for their end.

    Args:
        experiment: as configured; the workers find out by themselves whether they continue from a checkpoint.
        device: what `runner.devices.resolve` found.
        attempt: number of this execution of the run directory.
        poll: called a few times a second, to show progress.

    Raises:
        Interrupted: after the workers were ended.
    """
    device_type, workers, threads = device
    port, steps = shared_integers(1), shared_integers(workers)
    environment, pickled = _environment(experiment), pickle.dumps(experiment)
    processes: list[BaseProcess] = []
    kills = _oom_kills()
    for rank in range(workers):
        error_file(run_dir, rank).unlink(missing_ok=True)
        seat = Seat(rank, rank, workers, experiment.launch.nodes, workers, device_type, threads, attempt, port, steps)
        ranked = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranked |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
        processes.append(
            child.context.Process(target=worker.main, args=(str(run_dir), pickled, seat, ranked, sys.path))
        )
    try:
        try:
            for process in processes:
                process.start()
        except (OSError, EOFError) as error:
            return Outcome("failed", f"the workers could not be started: {error}")
        update_status(run_dir, workers=[{"rank": rank, "pid": p.pid} for rank, p in enumerate(processes)])
        late = _watch(run_dir, processes, experiment, steps, poll)
        codes = [p.exitcode for p in processes]  # before this process ends any of them
    finally:
        _end(processes)
    if late is not None:
        return _late(run_dir, *late)
    if not any(codes):
        return Outcome("completed", "")
    return _blame(run_dir, codes, killed_by_kernel=_oom_kills() > kills)


def _environment(experiment: Experiment) -> dict[str, str]:
    settings = experiment.launch
    return {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(settings.port or 0),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "inductor"),  # compiled code is shared by all runs
        **settings.env,
    }


def _watch(
    run_dir: Path, processes: list[BaseProcess], experiment: Experiment, steps: Any, poll: Callable[[], None]
) -> tuple[list[int], float] | None:
    """
    Until all have ended, one has failed (plus some grace), or no step was completed for too long.

    Returns:
        In the last case every rank's last completed step, and the minutes that were waited.
    """
    settings = experiment.launch
    seen, since, saved = list(steps), time.monotonic(), 0
    failed_at: float | None = None
    while alive := [p for p in processes if p.exitcode is None]:
        wait([p.sentinel for p in alive], timeout=POLL_S)
        poll()
        now = time.monotonic()
        if failed_at is None and any(p.exitcode for p in processes):
            failed_at = now
        if failed_at is not None and now - failed_at > GRACE_S:
            break
        if list(steps) != seen:
            seen, since = list(steps), now
        minutes = settings.timeout_minutes if min(seen) else settings.start_timeout_minutes
        if failed_at is None and now - since > 60 * minutes:
            if (size := _being_saved(run_dir)) == saved:
                return seen, minutes
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


def _late(run_dir: Path, steps: list[int], minutes: float) -> Outcome:
    """Names the rank that hangs. The others of its step wait for it in a collective, as the stacks in their logs show."""
    key = "timeout_minutes" if min(steps) else "start_timeout_minutes"
    behind = [rank for rank, step in enumerate(steps) if step == min(steps)]
    alone = [rank for rank in behind if "torch/distributed" not in last_stack(run_dir / "logs" / f"rank{rank}.log")]
    ranks = alone if len(alone) == 1 else behind
    who = f"rank {ranks[0]} hangs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hang"
    reason = f"no step was completed within launch.{key}({minutes:g}): {who} in step {min(steps) + 1}"
    return Outcome("timeout", reason, ranks[0])


def _end(processes: list[BaseProcess]) -> None:
    """End what still runs, and wait until it is gone. Processes are addressed by id: the forkserver may be gone, too."""
    for name in (signal.SIGTERM, signal.SIGKILL):
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


def _blame(run_dir: Path, codes: list[int | None], *, killed_by_kernel: bool) -> Outcome:
    """The rank that failed first, and why: a signal before an error, the cause before its victims, then by time."""
    errors = {rank: read_json(error_file(run_dir, rank)) for rank in range(len(codes))}

    def order(rank: int) -> tuple[int, float]:
        code, error = codes[rank] or 0, errors[rank]
        collateral = bool(error) and bool(COLLATERAL.search(error["message"]))
        # A signal is a cause, but for SIGABRT: that is also how a communication library ends a victim.
        guilt = (
            0 if code < 0 and code != -signal.SIGABRT else 1 if code > 0 and not collateral else 2 if code < 0 else 3
        )
        return guilt, error.get("time", float("inf"))

    rank = min((r for r, code in enumerate(codes) if code), key=order)
    code, error = codes[rank] or 0, errors[rank]
    if error:
        state = "oom" if error["oom"] else "failed"
        reason = _first_line(error["message"]) if error["plain"] else f"rank {rank}: {_first_line(error['message'])}"
    elif code == -signal.SIGKILL and killed_by_kernel:
        state, reason = "oom", f"rank {rank} was killed by the kernel: out of host memory"
    elif code < 0:
        state, reason = "failed", f"rank {rank} was ended by signal {signal.Signals(-code).name}"
    elif code == 255:
        state, reason = "failed", "the process that starts the workers was ended"
    else:
        state, reason = "failed", f"rank {rank} ended with exit code {code}"
    with suppress(OSError):  # on a full disk the reason is still said
        write_json(run_dir / "error.json", {"rank": rank, "exit_code": code, "state": state, "reason": reason, **error})
    return Outcome(state, reason, rank)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


def _oom_kills() -> int:
    """How often the kernel killed a process for memory since boot; 0 where it does not say."""
    found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0

"""Determine the outcome of a run. After a failure, exit codes, error files and logs show which rank failed first."""

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshrunner.runner.measure.out_of_memory import ON_DEVICE
from meshrunner.runner.rundir import Failure, RankError, last_exception, last_stack
from meshrunner.runner.rundir.files import ERROR, rank_error, rank_log

COLLATERAL = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (refused|closed)|remote (worker|process)|timed out waiting|"
    r"NCCL.*(abort|remote)|Failed to recv|Socket|Watchdog caught collective operation timeout",
    re.IGNORECASE,
)
"""Pattern of collateral errors: a rank lost its connection to another rank because the other rank failed first."""
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MACHINE = Path("/proc/vmstat")


@dataclass(frozen=True)
class Outcome:
    """The final state of a run from the view of one node, and the reason for this state. Nodes exchange outcomes as JSON."""

    state: str
    """Final state of the run, from `rundir.states.FINAL`."""
    reason: str
    rank: int | None = None
    """Rank that failed first; None if no rank failed."""
    exit_code: int | None = None
    """Exit code of the rank that failed first, or the negated signal number if a signal killed the rank."""
    collateral: bool = False
    """Whether the failure of `rank` may have been caused by the failure of another rank."""
    interrupted: bool = False
    """Whether the user interrupted the run. An interrupt also stops a sweep, even if the run completed."""
    time: float = field(default=0.0, compare=False)
    """Unix time at which a node published the outcome."""


def exit_status(state: str) -> int:
    """Return the exit status of a command whose single run ended in `state`: 0 for `completed`, 1 for `failed` and `oom`."""
    return {"completed": 0, "interrupted": 130, "preempted": 75}.get(state, 1)


def hang(run_dir: Path, first: int, steps: list[int], minutes: float) -> Outcome:
    """Return the outcome of a run that hung for `minutes`. `steps[i]` is the last step that rank `first + i` completed."""
    # Ranks that wait in a collective are not the cause. The stack of the rank that hangs contains no torch.distributed call.
    key = "timeout_minutes" if min(steps) else "start_timeout_minutes"
    behind = [first + i for i, step in enumerate(steps) if step == min(steps)]
    alone = [rank for rank in behind if "torch/distributed" not in last_stack(rank_log(run_dir, rank))]
    ranks = alone if len(alone) == 1 else behind
    who = f"rank {ranks[0]} hangs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hang"
    reason = f"no step was completed within launch.{key}({minutes:g}): {who} in step {min(steps) + 1}"
    return Outcome("timeout", reason, ranks[0], collateral=not alone)


def first_failure(run_dir: Path, codes: dict[int, int], *, killed_by_kernel: bool) -> Outcome:
    """Return the outcome of a failed run, with the rank that failed first. `codes` maps failed ranks to exit codes. Prefer ranks
    that were killed by a signal other than SIGABRT, then ranks whose failure is not collateral, then the earliest error."""
    errors = {rank: RankError.read(rank_error(run_dir, rank)) for rank in codes}
    errors |= {rank: _aborted(run_dir, rank) for rank in codes if codes[rank] == -signal.SIGABRT and not errors[rank]}

    def order(rank: int) -> int:
        code, error = codes[rank], errors[rank]
        if code < 0 and code != -signal.SIGABRT:
            return 0
        if error:
            return 3 if COLLATERAL.search(error.message) else 1
        # SIGABRT, unlike other signals, may be collateral: communication libraries abort ranks that lost a peer.
        return 2 if code < 0 else 1

    rank = min(codes, key=lambda rank: (order(rank), errors[rank].time or float("inf")))
    code, error = codes[rank], errors[rank]
    if error:
        state = "oom" if error.oom else "failed"
        first_line = (error.message.strip().splitlines() or [""])[0][:300]
        reason = first_line if error.plain else f"rank {rank}: {first_line}"
    elif code == -signal.SIGKILL and killed_by_kernel:
        state, reason = "oom", f"rank {rank} was killed by the kernel: out of host memory"
    elif code < 0:
        state, reason = "failed", f"rank {rank} was killed by signal {signal.Signals(-code).name}"
    elif code == 255:
        state, reason = "failed", "the process that starts the workers was killed"
    else:
        state, reason = "failed", f"rank {rank} ended with exit code {code}"
    return Outcome(state, reason, rank, exit_code=code, collateral=order(rank) > 1)


def _aborted(run_dir: Path, rank: int) -> RankError:
    """Return a record of the C++ exception in an aborted rank's log, or an empty record. The exception often comes from NCCL's
    watchdog."""
    log = rank_log(run_dir, rank)
    if not (message := last_exception(log)):
        return RankError()
    return RankError(time=log.stat().st_mtime, oom=ON_DEVICE.search(message) is not None, message=message)


def write_error(run_dir: Path, outcome: Outcome) -> None:
    """Write error.json about the rank that failed first. Write nothing if no rank failed or the run hung."""
    if outcome.rank is None or outcome.state == "timeout":
        return
    error = RankError.read(rank_error(run_dir, outcome.rank))
    found = Failure(rank=outcome.rank, exit_code=outcome.exit_code, state=outcome.state, reason=outcome.reason)
    with suppress(OSError):  # on a full disk the reason is still printed
        (found | error.as_json()).write(run_dir / ERROR)


def oom_kills() -> int:
    """Return how many processes of this cgroup the kernel's OOM killer has killed. If unknown, count the whole machine."""
    for counters in (*_cgroup_files(), MACHINE):
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)", counters.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _cgroup_files() -> Iterator[Path]:
    """Yield files that may hold the number of OOM kills in this cgroup or a parent. A container may show only the root cgroup."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder, name = CGROUPS, "memory.events"
            if "memory" in controllers.split(","):  # cgroups of version 1
                folder, name = CGROUPS / "memory", "memory.oom_control"
            elif controllers:
                continue
            cgroup = Path(path.lstrip("/"))
            yield from (folder / each / name for each in (cgroup, *cgroup.parents))

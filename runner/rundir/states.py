"""Read and update `status.json`, the record of a run's state and of its owner, the process that executes the run."""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from meshrunner.recipes.errors import AlreadyRunning
from meshrunner.runner.console import one_line
from meshrunner.runner.rundir.files import LOGS, STATUS, STATUS_LOCK
from meshrunner.runner.rundir.records import Count, JsonFile, Number, Text, null_as

FINAL = frozenset({"completed", "failed", "oom", "timeout", "skipped", "interrupted", "preempted"})
"""States of runs whose execution has ended."""
RESULTS = frozenset({"completed", "oom", "skipped"})
"""States that count as a result. A sweep executes a run in such a state again only if `sweep.rerun` names the state."""
CRASHED = frozenset({"failed", "timeout"})
"""States of runs that `sweep.retry` executes again."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HEARTBEAT_S = 10.0
STALE_S = 120.0
"""Seconds without a heartbeat after which an owner on another host counts as dead."""

State = Literal["pending", "running", "completed", "failed", "oom", "timeout", "skipped", "interrupted", "preempted"]


class Owner(JsonFile):
    """The process that executes a run. Start time and boot id distinguish processes that have the same pid."""

    host: Text = ""
    pid: Count | None = None
    pid_started: int | None = None
    """Start time of the process, in clock ticks since boot."""
    boot_id: Text | None = None
    slurm_job_id: Text | None = None
    slurm_restart: Text | None = None
    """Number of requeues of the SLURM job before the process started."""


class Status(JsonFile):
    """The content of `status.json`. Times are Unix times."""

    state: State | None = None
    """The state of the run; None if status.json is missing."""
    reason: Annotated[Text, null_as("")] = ""
    attempt: Annotated[Count, null_as(0)] = 0
    """Number of the current or last attempt: how many times the run was started or resumed."""
    started: Number | None = None
    ended: Number | None = None
    heartbeat: Number | None = None
    owner: Owner | None = None
    workers: Annotated[list[dict[str, int]], null_as([])] = []
    """The `rank` and `pid` of each worker."""


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to 2^53 - 1. Return False for a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def read_status(run_dir: Path) -> Status:
    """Return the status of a run. The result is empty if status.json is missing or damaged."""
    return Status.read(run_dir / STATUS)


def read_state(run_dir: Path) -> str:
    """Return the state of a run, or the string "None" if no state is recorded."""
    return str(read_status(run_dir).state)


def update_status(run_dir: Path, **changes: Any) -> Status:
    """Change some keys of `status.json` and return the new status."""
    # Do not lock in a generator: on Ctrl-C, the exception's traceback would keep the generator alive and the lock held.
    with (run_dir / STATUS_LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status = read_status(run_dir) | changes
        status.write(run_dir / STATUS)
    return status


def this_process() -> Owner:
    """Return the Owner record of this process."""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_started=started_at(os.getpid()),
        boot_id=BOOT_ID.read_text().strip(),
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        slurm_restart=os.environ.get("SLURM_RESTART_COUNT", "0"),
    )


def owner_is_alive(status: Status) -> bool:
    """Return whether the process that `status` names as the owner still executes the run."""
    owner = status.owner
    if status.state != "running" or not owner:
        return False
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if job is not None and owner.slurm_job_id == job and owner.slurm_restart != restart:
        return False  # SLURM has requeued the job, perhaps because the owner's node died
    if owner.host == socket.gethostname():
        same_boot = owner.boot_id == BOOT_ID.read_text().strip()
        return same_boot and started_at(owner.pid or 0) == owner.pid_started is not None
    return time.time() - (status.heartbeat or 0) < STALE_S


def condition(status: Status) -> str:
    """Return a verb phrase for messages about a run: `is completed`, `is skipped: REASON` or `is being executed by ...`."""
    if owner_is_alive(status) and status.owner:
        return f"is being executed by process {status.owner.pid} on {one_line(status.owner.host)}"
    return one_line(f"is {status.state}" + (f": {status.reason}" if status.reason else ""))


def claim(run_dir: Path) -> Status:
    """Make this process the owner of a run, and begin a new attempt. Raise AlreadyRunning if another owner is alive."""
    (run_dir / LOGS).mkdir(exist_ok=True)  # a directory made by hand may contain only config.yaml
    with (run_dir / STATUS_LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status = read_status(run_dir)
        if owner_is_alive(status):
            raise AlreadyRunning(f"{run_dir} {condition(status)}")
        now = time.time()
        status |= {"state": "running", "reason": "", "started": now, "ended": None, "heartbeat": now}
        status |= {"attempt": status.attempt + 1, "owner": this_process().as_json(), "workers": []}
        status.write(run_dir / STATUS)
    return status


@contextmanager
def heartbeat(beat: Callable[[], object], every_s: float = HEARTBEAT_S) -> Iterator[None]:
    """Call `beat` in a thread every `every_s` seconds. Ignore write errors, because a full disk must not end the run."""
    done = threading.Event()

    def keep_beating() -> None:
        while not done.wait(every_s):
            with suppress(OSError):
                beat()

    thread = threading.Thread(target=keep_beating, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def started_at(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if the process is gone or a zombie."""
    # psutil counts from the epoch, so its value changes if the clock is set. `status.json` needs an exact value.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])

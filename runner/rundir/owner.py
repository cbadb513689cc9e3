"""The owner of a run directory: the one process that executes it.

`status.json` names the owner and holds its heartbeat. An owner that is dead or stale may be replaced.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshrunner.recipes.errors import AlreadyRunning
from meshrunner.runner.console import one_line
from meshrunner.runner.process.tree import started_at
from meshrunner.runner.rundir.files import LOGS, STATUS
from meshrunner.runner.rundir.states import Owner, Status, read_status, status_lock, update_status

HEARTBEAT_S = 10.0
STALE_S = 120.0
"""Age of a heartbeat after which an owner on another host is stale."""


def this_process() -> Owner:
    """Return the record that identifies this process."""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_started=started_at(os.getpid()),
        boot_id=_boot_id(),
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        slurm_restart=os.environ.get("SLURM_RESTART_COUNT", "0"),
    )


def owner_is_alive(status: Status) -> bool:
    """Whether the owner in `status.json` still executes the run."""
    owner = status.owner
    if status.state != "running" or not owner:
        return False
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if job is not None and owner.slurm_job_id == job and owner.slurm_restart != restart:
        return False  # SLURM has requeued the job, perhaps because the owner's node died
    if owner.host == socket.gethostname():
        return owner.boot_id == _boot_id() and started_at(owner.pid or 0) == owner.pid_started is not None
    return time.time() - (status.heartbeat or 0) < STALE_S


def condition(status: Status) -> str:
    """Return what a message says after the name of a run: `is completed`, `is skipped: REASON`, `is being executed by ...`."""
    if owner_is_alive(status) and status.owner:
        return f"is being executed by process {status.owner.pid} on {one_line(status.owner.host)}"
    return one_line(f"is {status.state}" + (f": {status.reason}" if status.reason else ""))


def claim(run_dir: Path) -> Status:
    """Make this process the owner of a run and begin its next attempt; raise AlreadyRunning if another owner is alive."""
    (run_dir / LOGS).mkdir(exist_ok=True)  # a directory made by hand may contain config.yaml alone
    with status_lock(run_dir):
        status = read_status(run_dir)
        if owner_is_alive(status):
            raise AlreadyRunning(f"{run_dir} {condition(status)}")
        now = time.time()
        status |= {"state": "running", "reason": "", "started": now, "ended": None, "heartbeat": now}
        status |= {"attempt": status.attempt + 1, "owner": this_process().as_json(), "workers": []}
        status.write(run_dir / STATUS)
    return status


@contextmanager
def heartbeat(run_dir: Path) -> Iterator[None]:
    """Refresh the owner's heartbeat in the background. Failures are ignored: a full disk must not end the run."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            try:
                update_status(run_dir, heartbeat=time.time())
            except OSError:
                continue

    thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

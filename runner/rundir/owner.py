"""The owner of a run directory: the one process that executes it.

`status.json` names the owner and holds its heartbeat; an owner that is dead or stale may be replaced.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import AlreadyRunning
from meshrunner.runner.console import one_line
from meshrunner.runner.process.tree import started_at
from meshrunner.runner.rundir.files import LOGS, STATUS, write_json
from meshrunner.runner.rundir.states import read_status, status_lock, update_status

HEARTBEAT_S = 10.0
STALE_S = 120.0
"""Age of a heartbeat after which an owner on another host is stale."""
CLOCKS_S = 86400.0
"""Most that the clock of another host may be ahead."""


def this_process() -> dict[str, Any]:
    """The `owner` entry that identifies this process, even after its process id is reused."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": started_at(os.getpid()),
        "boot_id": _boot_id(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "slurm_restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def owner_is_alive(status: dict[str, Any]) -> bool:
    """Whether the owner in `status.json` still executes the run."""
    owner = status.get("owner") or {}
    if status.get("state") != "running" or not owner:
        return False
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if job is not None and owner.get("slurm_job_id") == job and owner.get("slurm_restart") != restart:
        return False  # SLURM has requeued the job, perhaps because the owner's node died
    if owner.get("host") == socket.gethostname():
        same_boot = owner.get("boot_id") == _boot_id()
        return same_boot and started_at(owner.get("pid") or 0) == owner.get("pid_started") is not None
    return -CLOCKS_S < time.time() - (status.get("heartbeat") or 0) < STALE_S


def owned_by(status: dict[str, Any]) -> str:
    """A clause that names a living owner, for messages."""
    return f"is being executed by process {status['owner'].get('pid')} on {status['owner'].get('host')}"


def condition(status: dict[str, Any]) -> str:
    """What is said of a run after its name: `is completed`, `is skipped: REASON`, `is being executed by process ...`."""
    if owner_is_alive(status):
        return one_line(owned_by(status))
    reason = status.get("reason")
    return one_line(f"is {status.get('state')}" + (f": {reason}" if reason else ""))


def claim(run_dir: Path) -> dict[str, Any]:
    """Make this process the owner of a run: state `running`, `attempt` + 1; raises AlreadyRunning if another owner is alive."""
    (run_dir / LOGS).mkdir(exist_ok=True)  # a directory made by hand may contain config.yaml alone
    with status_lock(run_dir):
        status = read_status(run_dir)
        if owner_is_alive(status):
            raise AlreadyRunning(f"{run_dir} {owned_by(status)}")
        now = time.time()
        status |= {"state": "running", "reason": "", "started": now, "ended": None, "heartbeat": now}
        status |= {"attempt": int(status.get("attempt") or 0) + 1, "owner": this_process(), "workers": []}
        write_json(run_dir / STATUS, status)
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

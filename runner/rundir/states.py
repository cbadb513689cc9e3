"""The states of a run, as recorded in `status.json`, and what each means for a sweep and for the exit status."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from meshrunner.runner.rundir.files import STATUS, STATUS_LOCK
from meshrunner.runner.rundir.records import Count, JsonFile, Number, Text, null_as

FINAL = frozenset({"completed", "failed", "oom", "timeout", "skipped", "interrupted", "preempted"})
"""States of a run that is no longer executed."""
RESULTS = frozenset({"completed", "oom", "skipped"})
"""States that are results: a sweep does not execute such a run again, except by `sweep.rerun`."""
CRASHED = frozenset({"failed", "timeout"})
"""States of a run that `sweep.retry` executes again."""
EXIT_STATUS = {"completed": 0, "interrupted": 130, "preempted": 75}
"""Exit status of a single run by its final state; every other state is 1."""

State = Literal["pending", "running", "completed", "failed", "oom", "timeout", "skipped", "interrupted", "preempted"]


class Owner(JsonFile):
    """The process that executes a run, identified even after its process id is reused."""

    host: Text = ""
    pid: Count | None = None
    pid_started: int | None = None
    """Clock ticks from boot to the start of the process."""
    boot_id: Text | None = None
    slurm_job_id: Text | None = None
    slurm_restart: Text | None = None
    """Number of times that SLURM had requeued the job."""


class Status(JsonFile):
    """The content of `status.json`. Times are unix times."""

    state: State | None = None
    """None if there is no file."""
    reason: Annotated[Text, null_as("")] = ""
    attempt: Annotated[Count, null_as(0)] = 0
    """Number of times that the run was started."""
    started: Number | None = None
    ended: Number | None = None
    heartbeat: Number | None = None
    owner: Owner | None = None
    workers: Annotated[list[dict[str, int]], null_as([])] = []
    """The `rank` and `pid` of each process that trains."""


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value of a configuration is a whole number of a sensible size, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def read_status(run_dir: Path) -> Status:
    """Return the status of a run; an empty one if the file is missing or damaged."""
    return Status.read(run_dir / STATUS)


def read_state(run_dir: Path) -> str:
    """Return the state of a run; "None" if none is recorded."""
    return str(read_status(run_dir).state)


def update_status(run_dir: Path, **changes: Any) -> Status:
    """Change some keys of `status.json` and return all of it."""
    with status_lock(run_dir):
        status = read_status(run_dir) | changes
        status.write(run_dir / STATUS)
    return status


@contextmanager
def status_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of `status.json`; wait for it first."""
    with (run_dir / STATUS_LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""The states of a run, as recorded in `status.json`, and what each means for a sweep and for the exit status."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshrunner.runner.rundir.files import STATUS, STATUS_LOCK, read_json, write_json

FINAL = frozenset({"completed", "failed", "oom", "timeout", "skipped", "interrupted", "preempted"})
"""States of a run that is no longer executed."""
RESULTS = frozenset({"completed", "oom", "skipped"})
"""States that are results: a sweep does not execute such a run again, except by `sweep.rerun`."""
CRASHED = frozenset({"failed", "timeout"})
"""States of a run that `sweep.retry` executes again."""
EXIT_STATUS = {"completed": 0, "interrupted": 130, "preempted": 75}
"""Exit status of a single run by its final state; every other state is 1."""


def read_status(run_dir: Path) -> dict[str, Any]:
    """The content of `status.json`; {} where there is none."""
    return read_json(run_dir / STATUS)


def read_state(run_dir: Path) -> str:
    """The state in `status.json`; "None" where there is none."""
    return str(read_status(run_dir).get("state"))


def update_status(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Change some keys of `status.json`; returns all of them."""
    with status_lock(run_dir):
        status = read_status(run_dir) | changes
        write_json(run_dir / STATUS, status)
    return status


@contextmanager
def status_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of `status.json`; waits for it."""
    with (run_dir / STATUS_LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""The states of a run, as recorded in `status.json`, and what each means for a sweep and for the exit status."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from meshrunner.runner.figures import number
from meshrunner.runner.rundir.files import STATUS, STATUS_LOCK, load_json, write_json

FINAL = frozenset({"completed", "failed", "oom", "timeout", "skipped", "interrupted", "preempted"})
"""States of a run that is no longer executed."""
RESULTS = frozenset({"completed", "oom", "skipped"})
"""States that are results: a sweep does not execute such a run again, except by `sweep.rerun`."""
CRASHED = frozenset({"failed", "timeout"})
"""States of a run that `sweep.retry` executes again."""
EXIT_STATUS = {"completed": 0, "interrupted": 130, "preempted": 75}
"""Exit status of a single run by its final state; every other state is 1."""


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number from 0 on of a sensible size: a step, an attempt, a process id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "state": ("a state", lambda value: isinstance(value, str) and value in FINAL | {"pending", "running"}),
    "reason": ("text", lambda value: isinstance(value, str)),
    "attempt": ("a whole number", is_count),
    "started": ("a time", lambda value: number(value) is not None),
    "ended": ("a time", lambda value: number(value) is not None),
    "heartbeat": ("a time", lambda value: number(value) is not None),
    "owner": ("a process", lambda value: isinstance(value, dict) and _is_process(value)),
    "workers": ("a list of processes", lambda value: isinstance(value, list) and all(map(_is_process, value))),
}
"""What the keys of `status.json` hold, unless they are null."""


def _is_process(value: Any) -> bool:
    named = isinstance(value, dict) and isinstance(value.get("host", ""), str)
    return named and is_count(value.get("pid", 0))


def load_status(run_dir: Path) -> dict[str, Any]:
    """The content of `status.json`; {} where there is none. Raises ValueError that says how it is damaged, and OSError."""
    status = load_json(run_dir / STATUS)
    for key, (kind, fits) in EXPECTED.items():
        if (value := status.get(key)) is not None and not fits(value):
            raise ValueError(f"{key}: expected {kind}, got {value!r:.60}")
    return status


def read_status(run_dir: Path) -> dict[str, Any]:
    """The content of `status.json`; {} where there is none or it is damaged."""
    try:
        return load_status(run_dir)
    except ValueError:
        return {}


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
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # whatever lies there: no waiting
    with os.fdopen(os.open(run_dir / STATUS_LOCK, flags, 0o666), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

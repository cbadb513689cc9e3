"""Process trees, read from /proc; processes that die with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, identified even after its id is reused."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""


def descendants(pid: int) -> list[Process]:
    """The living descendants of a process, parents first."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(Process(int(entry.name), int(fields[19])))
    found = list(children.get(pid, ()))
    for process in found:  # grows during the iteration
        found.extend(children.get(process.pid, ()))
    return found


def process_name(process: Process) -> str:
    """The kernel's name of a process, at most 15 characters; empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


def started_at(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_alive(process: Process) -> bool:
    """Whether a process exists and is not a zombie."""
    return started_at(process.pid) == process.started


def kill(process: Process) -> None:
    """Send SIGKILL to a process, unless it is gone."""
    if is_alive(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name: state, parent, ...; None when the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields


_prctl: Callable[..., int] = ctypes.CDLL(None).prctl  # looked up on import: unsafe between fork and exec


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies (PR_SET_PDEATHSIG)."""
    _prctl(1, number)

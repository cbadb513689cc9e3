"""The process tree as /proc shows it: a tracker may have started processes of its own, and none may stay behind."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, named beyond reuse of its id."""

    pid: int
    started: int
    """Clock ticks from boot."""


def descendants(pid: int) -> list[Process]:
    """The living children of a process, their children, and so on."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(Process(int(entry.name), int(fields[19])))
    found = list(children.get(pid, ()))
    for process in found:  # grows while it is walked
        found.extend(children.get(process.pid, ()))
    return found


def name_of(process: Process) -> str:
    """The kernel's name of a process, at most 15 characters; empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


def is_alive(process: Process) -> bool:
    """Whether a process still runs, or could."""
    fields = _fields(process.pid)
    return fields is not None and int(fields[19]) == process.started


def kill(process: Process) -> None:
    """SIGKILL, unless it is gone."""
    if is_alive(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _fields(pid: int) -> list[str] | None:
    """/proc/PID/stat after the name: state, parent, ...; None when the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields

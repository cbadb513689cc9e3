"""Processes as /proc shows them: children of children, whether one lives, and how one dies with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
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
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
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


def started_at(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None when it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_alive(process: Process) -> bool:
    """Whether a process still runs, or could."""
    return started_at(process.pid) == process.started


def kill(process: Process) -> None:
    """SIGKILL, unless it is gone."""
    if is_alive(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat after the name: state, parent, ...; None when the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields


_prctl: Callable[..., int] = ctypes.CDLL(None).prctl  # looked up here: nothing may be imported between fork and exec


def die_with_parent(number: signal.Signals) -> None:
    """This process is sent a signal when the process that forked it dies (PR_SET_PDEATHSIG)."""
    _prctl(1, number)

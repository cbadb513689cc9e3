"""Process trees, and processes that die with their parent."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """Return the living descendants of a process."""
    import psutil  # here: `status` imports this module for `started_at` alone

    try:
        return [each for each in psutil.Process(pid).children(recursive=True) if is_alive(each)]
    except psutil.NoSuchProcess:
        return []


def process_name(process: psutil.Process) -> str:
    """Return the name of a process; empty if the process is gone."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie. A reused process id does not count."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(process: psutil.Process) -> None:
    """Send SIGKILL to a process, unless it is gone."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process.kill()


def started_at(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is gone or a zombie."""
    # psutil converts ticks to seconds since the epoch, which shift when the clock is set; `status.json` needs an exact value.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


_prctl: Callable[..., int] = ctypes.CDLL(None).prctl  # looked up on import: unsafe between fork and exec


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies (PR_SET_PDEATHSIG)."""
    _prctl(1, number)

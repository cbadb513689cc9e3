"""Finds and kills the descendants of a process."""

from contextlib import suppress

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """Return the living descendants of a process."""
    with suppress(psutil.NoSuchProcess):
        return [each for each in psutil.Process(pid).children(recursive=True) if is_alive(each)]
    return []


def process_name(process: psutil.Process) -> str:
    """Return the name of a process, or an empty string if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs. Return False for a zombie, and for another process that got the same process id."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill(process: psutil.Process) -> None:
    """Send SIGKILL to a process, unless the process has ended."""
    with suppress(psutil.NoSuchProcess):
        process.kill()

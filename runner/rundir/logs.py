"""Read the end of a worker's log."""

import os
import re
from itertools import takewhile
from pathlib import Path

from meshrunner.recipes.storage import open_regular

TAIL_BYTES = 64 * 1024
LINES = 12
WIDTH = 200
CURRENT = "Current thread"
"""Start of the line that faulthandler writes before the stack of the running thread."""
FATAL = "Fatal Python error"
"""Start of the line that faulthandler writes when a process crashes."""
TERMINATED = re.compile(r"\s*what\(\):\s+(?:\[PG [^\]]*\] )?(.*)")
"""Pattern for the line in which C++ reports an uncaught exception. Group 1 is the message without torch's `[PG ...]` prefix."""
STACK_LINES = 200
"""Maximum length of a stack, in lines. If a log has more lines after the start of a stack, the process continued to run."""


def _tail(log: Path) -> list[str]:
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return []


def last_stack(log: Path) -> str:
    """Return the last stack that faulthandler wrote for a hung or crashed process, or "" if the log has no stack."""
    lines = _tail(log)
    starts = [i for i, line in enumerate(lines) if line.startswith(CURRENT)]
    return "\n".join(lines[starts[-1] :]) if starts else ""


def last_exception(log: Path) -> str:
    """Return the message of the C++ exception that aborted the process, or "" if no C++ exception aborted it."""
    lines = _tail(log)
    found = [i for i, line in enumerate(lines) if TERMINATED.match(line)]
    # All attempts append to the same log. If two crashes follow the message, an earlier attempt wrote the message.
    if not found or sum(line.startswith(FATAL) for line in lines[found[-1] :]) > 1:
        return ""
    ends = ("Exception raised from ", "frame #", FATAL)
    message = takewhile(lambda line: line and not line.startswith(ends), lines[found[-1] :])
    return TERMINATED.sub(r"\1", "\n".join(message), count=1)


def last_lines(log: Path) -> list[str]:
    """Return the lines of a log to show to a user: the last lines or, if the log ends with a stack, the start of the stack."""
    lines = _tail(log)
    fatal = [i for i, line in enumerate(lines) if line.startswith(FATAL)]
    hung = [i for i, line in enumerate(lines) if line.startswith(CURRENT)]
    if not hung or len(lines) - hung[-1] > STACK_LINES:
        shown = lines[-LINES:]
    else:
        shown = [*(lines[i] for i in fatal[-1:]), *lines[hung[-1] : hung[-1] + LINES]]
    return [line[:WIDTH] for line in shown]

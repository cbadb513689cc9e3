"""An exception in a class of the user's own, as its author reads it: the class, the exception, the lines of the user's files."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from meshrunner.runner.console import one_line

OURS = ("meshrunner", "hydra_plugins")
"""Packages of this program."""
INSTALLED = tuple({f"{path}/" for name, path in sysconfig.get_paths().items() if name.endswith(("stdlib", "lib"))})
MAX_LINES, MAX_WIDTH = 5, 300
"""Lines of the user's files, the innermost, and characters of a line that are shown."""


def fault(error: BaseException) -> str:
    """
    `own.gpt:GPT.network raised TypeError: ...`, and below it the lines of the user's files that it came through.

    Empty where no method of a class of the user's was at work.
    """
    own = list(_own_frames(error))
    begun = next((frame for frame, _ in own if {"self", "cls"} & frame.f_locals.keys()), None)
    if begun is None:
        return ""
    what = f"{begun.f_globals.get('__name__')}:{begun.f_code.co_qualname} raised {type(error).__name__}"
    said = one_line(error)
    lines = [f"{what}: {said}" if said else what]
    lines += [f"  {_line(frame, number)}" for frame, number in own[-MAX_LINES:]]
    return "\n".join(line[:MAX_WIDTH] for line in lines)


def innermost(error: BaseException) -> str:
    """The last line of the user's files that an exception came through: `FILE, line 3: x = f(y)`; empty if there is none."""
    own = list(_own_frames(error))
    return _line(*own[-1])[:MAX_WIDTH] if own else ""


def _line(frame: FrameType, number: int) -> str:
    file = frame.f_code.co_filename
    return f"{file}, line {number}: {linecache.getline(file, number).strip()}"


def _own_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The calls of code that is neither of this program nor installed, the outermost first, each with its line."""
    for frame, line in walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in OURS and not file.startswith(INSTALLED) and Path(file).is_file():
            yield frame, line

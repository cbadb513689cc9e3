"""Describes exceptions raised in a user's own classes: the method, the exception and the lines of code."""

import linecache
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from meshrunner.runner.console import one_line

OURS = ("meshrunner", "hydra_plugins")
INSTALLED = tuple({f"{path}/" for name, path in sysconfig.get_paths().items() if name.endswith(("stdlib", "lib"))})
MAX_LINES, MAX_WIDTH = 5, 300
"""Maximum number of lines of user code to show, and maximum number of characters per line. The innermost lines are shown."""


def fault(error: BaseException) -> str:
    """Return a line like `own.gpt:GPT.network raised TypeError: ...`, then the lines of user code; "" if no user method ran."""
    own = list(_own_lines(error))
    method = next((frame for frame, _ in own if {"self", "cls"} & set(frame.f_locals)), None)
    if method is None:
        return ""
    what = f"{method.f_globals.get('__name__')}:{method.f_code.co_qualname} raised {type(error).__name__}"
    lines = [f"{what}: {one_line(error)}".removesuffix(": "), *(f"  {line}" for _, line in own[-MAX_LINES:])]
    return "\n".join(line[:MAX_WIDTH] for line in lines)


def innermost(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback, such as `FILE, line 3: x = f(y)`, or "" if there is none."""
    lines = [line for _, line in _own_lines(error)]
    return lines[-1][:MAX_WIDTH] if lines else ""


def _own_lines(error: BaseException) -> Iterator[tuple[FrameType, str]]:
    """Yield each frame of user code with its current line, outermost frame first. Skip meshrunner and installed packages."""
    for frame, number in walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in OURS and not file.startswith(INSTALLED) and Path(file).is_file():
            yield frame, f"{file}, line {number}: {linecache.getline(file, number).strip()}"

"""
Terminal output: tables as wide as the terminal and uncut when piped, warnings on stderr, progress of slow work, short paths.

Text from files, names and the environment is never interpreted as markup, and control characters are shown as escapes.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 400
"""Columns without a terminal: nothing is folded or cut."""
SILENT_S = 2.0
"""Seconds after which work is named if no terminal shows it immediately."""
WIPE = "\r\x1b[2K"
_to_wipe = False
"""Whether the terminal currently shows a `naming` line."""
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls other than tab and newline; terminal escapes begin with one
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these reverse the direction of text
    "\u2028\u2029\ud800-\udfff]"  # line separators; surrogates, which cannot be encoded
)


def printable(text: str) -> str:
    """Return text with control characters and characters that cannot be encoded as escapes: `\\x1b`, `\\u202e`."""
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: object) -> str:
    """Return anything as printable text without line breaks, for a cell or a sentence."""
    return " ".join(printable(str(text)).split())


def say(text: object, *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print text that may come from files, names or the environment."""
    _wipe()
    print(printable(str(text)), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """
    Name the work that a person waits for: at once on a terminal, in a line that is erased when the context ends.

    The line goes to stderr because stdout may be a script, or has to stay empty if the configuration is wrong.
    """
    global _to_wipe
    if not sys.stderr.isatty() or os.environ.get("TERM") in (None, "", "dumb"):
        with Slow(to_stderr=True) as slow:
            slow.doing(what)
            yield
        return
    sys.stderr.write(f"{what} ...")
    sys.stderr.flush()
    _to_wipe = True
    try:
        yield
    finally:
        _wipe()


def _wipe() -> None:
    global _to_wipe
    if _to_wipe:
        _to_wipe = False
        sys.stderr.write(WIPE)
        sys.stderr.flush()


class Slow:
    """A context manager that names work which lasts longer than SILENT_S, in a line of its own."""

    def __init__(self, whose: str = "", *, to_stderr: bool = False) -> None:
        """Prefix every line with `whose`."""
        self.whose = whose
        self._to_stderr = to_stderr
        self._what = ""
        self._timer: threading.Timer | None = None

    def doing(self, what: str) -> None:
        """Say what begins now; an empty text ends it."""
        if what == self._what:
            return
        self._what = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what:
            line = f"{self.whose}{what} ..."
            self._timer = threading.Timer(SILENT_S, say, [line], {"to_stderr": self._to_stderr})
            self._timer.daemon = True
            self._timer.start()

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        self.doing("")


def console() -> Console:
    """Return a console on stdout that prints strings as they are: no markup, no emoji codes, no colours for numbers."""
    from rich.console import Console
    from rich.text import Text

    class LiteralConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return LiteralConsole(markup=False, emoji=False, highlight=False, soft_wrap=True, width=width)


def on_terminal() -> bool:
    """Return whether stdout is a terminal by rich's rules. Import rich, which takes a while, only if it may be one."""
    told = os.environ.keys() & {"FORCE_COLOR", "TTY_COMPATIBLE"}
    return bool(sys.stdout.isatty() or told) and console().is_terminal


def warn(text: str) -> None:
    """Print one line to stderr."""
    say(f"meshrunner: {text}", to_stderr=True)


def shown(path: Path) -> Path:
    """Return a path relative to the current directory if it is below it, else unchanged."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path


def duration(seconds: float) -> str:
    """Return a duration as text: `1h02m`, `3m10s`, `5s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"

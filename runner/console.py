"""
Terminal output: tables on stdout, as wide as the terminal and uncut when piped; warnings on stderr; short paths.

Text from files, names and the environment is never markup, and what would steer the terminal is shown as an escape.
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
"""Width without a terminal, in columns: nothing is folded or cut."""
SILENT_S = 2.0
"""Seconds that work goes on before it is named where no terminal shows it at once."""
WIPE = "\r\x1b[2K"
_to_wipe = False
"""Whether what `naming` shows stands on the terminal."""
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and newline: terminal escapes begin with one
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these turn the direction of text around
    "\u2028\u2029\ud800-\udfff]"  # line separators; halves of a pair, which no encoding has
)


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters, and what cannot be encoded, as `\\x1b`, `\\u202e`."""
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: object) -> str:
    """Anything as printable text without line breaks, for a cell or a sentence."""
    return " ".join(printable(str(text)).split())


def say(text: object, *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print text that may come from files, names or the environment."""
    _wipe()
    print(printable(str(text)), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """
    A context for work of this process that a person waits for: on a terminal it is named at once, in a line that is wiped.

    On stderr: what is printed to stdout may be a script, or nothing, if the configuration is wrong.
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
    """Work that is named in a line of its own once it has lasted SILENT_S, as most takes less. A context manager."""

    def __init__(self, whose: str = "", *, to_stderr: bool = False) -> None:
        """whose: what the lines begin with."""
        self.whose = whose
        self._to_stderr = to_stderr
        self._what = ""
        self._timer: threading.Timer | None = None

    def doing(self, what: str) -> None:
        """Something else begins; empty: nothing that may take long."""
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
    """A console on stdout that takes strings as they are (`printable`): no markup, no emoji codes, no colours for numbers."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Plain(markup=False, emoji=False, highlight=False, soft_wrap=True, width=width)


def warn(text: str) -> None:
    """Print one line to stderr."""
    say(f"meshrunner: {text}", to_stderr=True)


def shown(path: Path) -> Path:
    """A path relative to the current directory if it is below it, else unchanged."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed meanwhile
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path


def duration(seconds: float) -> str:
    """A duration as text: `1h02m`, `3m10s`, `5s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"

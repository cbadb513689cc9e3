"""Print text, warnings, tables and the name of the work in progress. Text may come from files or the environment, so markup in it
is not interpreted and control characters are escaped. This module imports little, to keep `meshrunner --help` fast."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from threading import Timer
    from typing import Any

    from rich.console import Console
    from rich.table import Table

WIDEST, NARROWEST = 120, 40
"""Maximum and minimum width of wrapped text, in characters. Without a terminal, the maximum is used."""
WIDEST_TERM = 36
"""Maximum width of the left column in a list made by `in_two_columns`, in characters."""
PIPED_WIDTH = 400
"""Width of a table that is printed to a pipe or file, in characters: large enough that no cell is folded or cut."""
SILENT_S = 2.0
"""Seconds after which the name of unfinished work is printed. On a terminal, `naming` prints the name at once."""
WIPE = "\r\x1b[2K"
_to_wipe = False
"""Whether the terminal shows a line printed by `naming`. This line must be erased before other output."""
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls other than tab and newline, including the start of terminal escapes
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # changes of text direction
    "\u2028\u2029\ud800-\udfff]"  # line separators; surrogates, which cannot be encoded
)


def printable(text: str) -> str:
    """Return text with unprintable characters escaped: `\\x1b`, `\\u202e`."""
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: object) -> str:
    """Return the text of an object, printable and without line breaks."""
    return " ".join(printable(str(text)).split())


def say(text: object, *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print the text of an object with unprintable characters escaped."""
    global _to_wipe
    if _to_wipe:
        _to_wipe = False
        print(WIPE, end="", file=sys.stderr, flush=True)
    print(printable(str(text)), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)


@contextmanager
def naming(what: str) -> Iterator[Callable[[int, int], None]]:
    """Print `what` to stderr as the name of the work in the `with` block. On a terminal, erase the name when the work ends. Yield
    a function that receives the number of finished parts and the number of all parts. On a terminal, the function shows both
    numbers and the time left."""
    if not sys.stderr.isatty() or os.environ.get("TERM") in (None, "", "dumb"):
        with Slow(to_stderr=True) as slow:
            slow.doing(what)
            yield lambda done, total: None
        return
    began = time.monotonic()

    def show(done: int = 0, total: int = 0) -> None:
        global _to_wipe
        left = duration((time.monotonic() - began) * (total - done) / max(done, 1))
        say(f"{what} ..." + f" {done} of {total}, about {left} left" * bool(done), end="", to_stderr=True)
        _to_wipe = True

    show()
    try:
        yield show
    finally:
        say("", end="", to_stderr=True)


class Slow:
    """A context manager that prints the name of any work that lasts longer than SILENT_S seconds."""

    def __init__(self, whose: str = "", *, to_stderr: bool = False) -> None:
        """Prepare to print the names of work. `whose` is a prefix of each name, such as `run_3: `."""
        self.whose, self._to_stderr = whose, to_stderr
        self._what = ""
        self._timer: Timer | None = None

    def doing(self, what: str) -> None:
        """Record that any earlier work has ended and the work named `what` begins. If `what` is empty, no work begins."""
        if what == self._what:
            return
        self._what = what
        if self._timer is not None:
            self._timer.cancel()
        if what:
            from threading import Timer

            self._timer = Timer(SILENT_S, say, [f"{self.whose}{what} ..."], {"to_stderr": self._to_stderr})
            self._timer.daemon = True
            self._timer.start()

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        self.doing("")


def console() -> Console:
    """Return a console on stdout that prints strings literally, without markup, emoji codes or highlighting."""
    from rich.console import Console
    from rich.text import Text

    class LiteralConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return LiteralConsole(markup=False, emoji=False, highlight=False, soft_wrap=True, width=width)


def table_of(rows: Iterable[Iterable[str]], titles: Sequence[str] = (), *, numbers: bool = False) -> Table:
    """Return a table without ruled lines. If `numbers` is true, right-align all columns but the first."""
    from rich.table import Table

    table = Table(box=None, show_header=bool(titles), pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if numbers and table.columns else "left")
    for row in rows:
        table.add_row(*row)
    return table


def on_terminal() -> bool:
    """Return whether rich considers stdout a terminal. Import rich, which is slow, only if stdout may be a terminal."""
    forced = os.environ.keys() & {"FORCE_COLOR", "TTY_COMPATIBLE"}
    return bool(sys.stdout.isatty() or forced) and console().is_terminal


def warn(text: str) -> None:
    """Print a warning to stderr."""
    say(f"meshrunner: {text}", to_stderr=True)


def shown(path: Path) -> Path:
    """Return a path inside the current directory as a relative path, and any other path unchanged."""
    with suppress(FileNotFoundError, ValueError):  # the current directory was removed, or the path is not below it
        return path.relative_to(path.cwd())
    return path


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, singular or plural: `1 run`, `3 runs`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Return a duration as text: `1h02m`, `3m10s`, `5s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def columns() -> int:
    """Return the width at which to wrap text, in characters. Use stderr's terminal if stdout is not a terminal."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            return max(NARROWEST, min(os.get_terminal_size(stream.fileno()).columns, WIDEST))
    return WIDEST


def in_two_columns(rows: Iterable[tuple[str, str]], indent: int = 2) -> str:
    """Return (term, explanation) pairs as text in two columns, in the style of argparse's list of options."""
    rows, width = list(rows), columns()
    left = min(WIDEST_TERM, max((len(term) for term, _ in rows), default=0) + 2, width // 2) + indent
    lines = []
    for term, text in rows:
        wrapped = textwrap.wrap(text, max(width - left, 20), break_long_words=False, break_on_hyphens=False)
        start = " " * indent + term.rstrip()
        if len(start) + 2 <= left and wrapped:
            start = start.ljust(left) + wrapped.pop(0)
        lines += [start, *(" " * left + line for line in wrapped)]
    return "\n".join(lines)


def paragraph(text: str, indent: int = 2, width: int | None = None) -> str:
    """Return text with each line indented and wrapped to `width` characters, by default to the width of the terminal."""
    margin = " " * indent
    return "\n".join(
        textwrap.fill(line, width or columns(), initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
        for line in text.splitlines()
    )

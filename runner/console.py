"""Terminal output: tables on stdout, as wide as the terminal and uncut when piped; warnings on stderr; short paths."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 400
"""Width without a terminal, in columns: nothing is folded or cut."""


def console() -> Console:
    """A console on stdout that leaves numbers and paths uncoloured."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def warn(text: str) -> None:
    """Print one line to stderr."""
    print(f"meshrunner: {text}", file=sys.stderr, flush=True)


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

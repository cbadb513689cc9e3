"""Printing for people: as wide as the terminal, and uncut when piped."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 400
"""Columns when there is no terminal: wide enough that nothing is folded or cut."""


def console() -> Console:
    """A console on stdout that leaves numbers and paths uncoloured."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPED_WIDTH)

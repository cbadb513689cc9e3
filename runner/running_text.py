"""Wraps paragraphs and lists of terms to the width of the terminal. It imports little to keep `meshrunner --help` fast."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress

WIDEST, NARROWEST = 120, 40
"""Maximum columns of running text, also used without a terminal, and minimum columns."""
WIDEST_TERM = 36
"""Most columns for terms in front of their explanations."""


def columns() -> int:
    """Return the columns for running text. With a pager on stdout, the width is that of stderr."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            return max(NARROWEST, min(os.get_terminal_size(stream.fileno()).columns, WIDEST))
    return WIDEST


def in_two_columns(rows: Iterable[tuple[str, str]], indent: int = 2) -> str:
    """Return terms and their explanations in two columns, as argparse does."""
    rows, width = list(rows), columns()
    left = min(WIDEST_TERM, max((len(term) for term, _ in rows), default=0) + 2, width // 2) + indent
    lines = []
    for term, text in rows:
        wrapped = textwrap.wrap(text, max(width - left, 20), break_long_words=False, break_on_hyphens=False)
        start = " " * indent + term.rstrip()
        if len(start) + 2 > left or not wrapped:
            lines.append(start)
        else:
            lines.append(start.ljust(left) + wrapped.pop(0))
        lines += [" " * left + line for line in wrapped]
    return "\n".join(lines)


def paragraph(text: str, indent: int = 2) -> str:
    """Return text with each of its lines wrapped."""
    margin = " " * indent
    return "\n".join(
        textwrap.fill(line, columns(), initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
        for line in text.splitlines()
    )

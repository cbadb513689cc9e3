"""Format text tables as Markdown, and fit them into the width of a terminal."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from meshrunner.runner.console import one_line

BETWEEN = 3
"""Number of characters between two columns of a table on a terminal."""


class Column(NamedTuple):
    """One column of a table."""

    title: str
    cells: list[str]
    leads: bool = False
    """Whether the column must be in the first table if the columns do not fit into a single table."""


def lines_of(table: Sequence[Column]) -> list[str]:
    """Return the lines of an aligned Markdown table."""
    escaped = [[_cell(text) for text in (column.title, *column.cells)] for column in table]
    widths = [max(map(len, column)) for column in escaped]
    head, *rows = (f"| {' | '.join(map(str.ljust, row, widths))} |" for row in zip(*escaped, strict=True))
    return [head, "|".join(["", *("-" * (width + 2) for width in widths), ""]), *rows]


def _cell(text: str) -> str:
    """Escape `|`, and any backslash before it, so that the text stays inside its Markdown cell."""
    return re.sub(r"(\\*)\|", r"\1\1\\|", one_line(text))


def fitted(text: str, width: int) -> str:
    """Shorten text to `width` characters. Cut out the middle, because names of runs differ at the beginning and the end."""
    if len(text) <= width:
        return text
    end = width // 3
    return f"{text[: width - end - 1]}…{text[len(text) - end :]}"


def narrowest(column: Column) -> int:
    """Return the smallest width of a column, in characters. The title may wrap between words; cells may not."""
    return max(map(len, [*column.title.split(), *column.cells]))

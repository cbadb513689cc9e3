"""The table as text: Markdown to paste and to pipe, and as wide as the terminal for a person in front of one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshrunner.runner.compare.cells import UNTESTED, Column, columns, legend, reasons
from meshrunner.runner.compare.facts import facts
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.rows import Comparison
from meshrunner.runner.console import one_line

BETWEEN = 3
"""Characters that a terminal's table needs beside each column's."""


def markdown(comparison: Comparison) -> str:
    """What is found, the table in Markdown, aligned, and what is to be said below it, with empty lines between them."""
    below = [*legend(comparison), *comparison.remarks]
    listed = [f"- {line}" for line in [*reasons(comparison), *_facts(comparison)]]
    blocks = [
        [*map(one_line, findings(comparison))],
        lines_of(columns(comparison)),
        [*map(one_line, below)],
        [*map(one_line, listed)],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _facts(comparison: Comparison) -> list[str]:
    return [f"{title}: {value}" for title, value in facts(comparison).items()]


def lines_of(table: Sequence[Column]) -> list[str]:
    """A table in Markdown, aligned."""
    escaped = [[_cell(text) for text in (title, *cells)] for title, cells in table]
    widths = [max(map(len, column)) for column in escaped]
    head, *rows = (f"| {' | '.join(map(str.ljust, row, widths))} |" for row in zip(*escaped, strict=True))
    return [head, "|".join(["", *("-" * (width + 2) for width in widths), ""]), *rows]


def _cell(text: str) -> str:
    """Text that does not end its cell: a bar is escaped, and what would escape its escape."""
    return re.sub(r"(\\*)\|", r"\1\1\\|", one_line(text))


def print_table(comparison: Comparison) -> None:
    """To the terminal with rich; what is wider continues in a table below. Piped: as Markdown, complete."""
    from meshrunner.runner.console import console

    screen = console()
    if not screen.is_terminal:
        print(markdown(comparison))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for line in findings(comparison):
        screen.print(one_line(line))
    for part in parts(columns(comparison), screen.width):
        drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in part:
            drawn.add_column(
                one_line(column.title), width=min(narrowest(column), screen.width - BETWEEN), overflow="fold"
            )
        for row in zip(*(cells for _, cells in part), strict=True):
            drawn.add_row(*(Text(one_line(cell), style="dim" if UNTESTED in cell else "") for cell in row))
        screen.print(drawn)
    for line in [*legend(comparison), *comparison.remarks, *reasons(comparison), *_facts(comparison)]:
        screen.print(one_line(line))
    if comparison.baseline is None and comparison.keys:
        screen.print("--baseline KEY=VALUE adds how each row compares with another")


def parts(table: Sequence[Column], width: int) -> list[list[Column]]:
    """Cut a table into tables no wider than the terminal; more than one, and a row's number begins its line in each."""
    if sum(narrowest(column) + BETWEEN for column in table) <= width:
        return [list(table)]
    numbers = Column("#", [str(i + 1) for i in range(len(table[0].cells))])
    found: list[list[Column]] = []
    room = 0
    for column in table:
        needed = narrowest(column) + BETWEEN
        if needed > room:
            found.append([numbers])
            room = width - narrowest(numbers) - BETWEEN
        found[-1].append(column)
        room -= needed
    return found


def narrowest(column: Column) -> int:
    """Characters that a column needs when its title is folded between words and its cells are not."""
    return max(map(len, [*column.title.split(), *column.cells]))

"""Print a comparison: as tables that fit the terminal, or as Markdown if the output is piped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from meshrunner.runner.compare import best
from meshrunner.runner.compare.cells import UNTESTED, columns, facts, legend, reasons, row_label
from meshrunner.runner.compare.comparison import Comparison
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.text_table import BETWEEN, Column, fitted, lines_of, narrowest
from meshrunner.runner.console import console, on_terminal, one_line

if TYPE_CHECKING:
    from rich.table import Table


def markdown(comparison: Comparison) -> str:
    """Return a comparison as Markdown: sentences that summarise it, the aligned table, and explanations."""
    blocks = [
        lines_of(best.columns(comparison)) if comparison.best_by else [],
        [*map(one_line, findings(comparison))],
        lines_of(columns(comparison)),
        [f"- {line}" for line in _below(comparison)],  # without bullets, Markdown joins the lines into one paragraph
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def html(comparison: Comparison) -> str:
    """Return a comparison as HTML for notebooks. The HTML sets no colours, so that it is readable in light and dark themes."""

    def line(cell: str, cells: Sequence[str], tag: str = "tr") -> str:
        return f"<{tag}>{''.join(f'<{cell}>{escape(one_line(text))}</{cell}>' for text in cells)}</{tag}>"

    titles, cells, _ = zip(*columns(comparison), strict=True)
    table = [line("th", titles), *(line("td", row) for row in zip(*cells, strict=True))]
    above, below = line("p", findings(comparison), "div"), line("li", _below(comparison), "ul")
    return f"{above}<table>{''.join(table)}</table>{below}"


def _below(comparison: Comparison) -> list[str]:
    """Return the lines below the table: explanations, and facts about the runs."""
    below = [*legend(comparison), *comparison.remarks, *reasons(comparison)]
    return [*map(one_line, below), *(one_line(f"{title}: {value}") for title, value in facts(comparison).items())]


def print_table(comparison: Comparison) -> None:
    """Print a comparison as Markdown if the output is piped, else as one or more tables that fit the terminal's width."""
    if not on_terminal():
        print(markdown(comparison))
        return
    screen = console()

    def sentences(lines: Sequence[str]) -> None:
        for line in lines:
            screen.print(one_line(line), soft_wrap=False)  # folded between words

    if comparison.best_by:
        print_best(comparison)
    sentences(found := findings(comparison))
    names = [row_label(comparison, row) for row in comparison.rows]
    tables = parts(columns(comparison), screen.width, names, max(len(comparison.keys), 1))
    for table in tables:
        screen.print(_drawn(table, screen.width))
    sentences([*legend(comparison), *comparison.remarks, *reasons(comparison)])
    for title, value in facts(comparison).items():
        screen.print(one_line(f"{title}: {value}"))  # not folded, so that commands can be copied
    if comparison.baseline is None and comparison.keys:
        sentences(["--baseline KEY=VALUE compares each row with a baseline row"])
    if len(tables) * len(comparison.rows) > screen.height:
        hint = (
            "`meshrunner compare DIR --top N` shows the N fastest rows, --where KEY=VALUE selects rows, "
            "--sort KEY sorts rows"
        )
        sentences(["", *found, f"{len(comparison.rows)} rows: {hint}"])  # the first lines have scrolled off the screen


def print_best(comparison: Comparison) -> None:
    """Print the table of best rows: as Markdown if the output is piped, else as tables that fit the terminal's width."""
    print_columns(best.columns(comparison), len(comparison.best_by))


def print_columns(table: Sequence[Column], keys: int = 1) -> None:
    """Print columns as Markdown if the output is piped, else as tables that fit. The first `keys` columns identify a row."""
    screen = console()
    if not on_terminal():
        print("\n".join(lines_of(table)))
        return
    names = list(map(" ".join, zip(*(column.cells for column in table[:keys]), strict=True)))
    for part in parts(table, screen.width, names, keys):
        screen.print(_drawn(part, screen.width))


def _drawn(columns: Sequence[Column], width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(one_line(column.title), width=min(narrowest(column), width - BETWEEN), overflow="fold")
    for row in zip(*(cells for _, cells, _ in columns), strict=True):
        drawn.add_row(*(Text(one_line(cell), style="dim" if UNTESTED in cell else "") for cell in row))
    return drawn


def parts(table: Sequence[Column], width: int, names: Sequence[str], keys: int = 1) -> list[list[Column]]:
    """If a table is wider than `width` characters, split it into several tables with fewer columns. Each table starts with row
    numbers. The first `keys` columns identify a row, so each table repeats them. If these columns leave too little room for the
    others, the tables repeat shortened row names instead, and extra tables show the first `keys` columns."""
    if _needed(table) <= width:
        return [list(table)]
    leading = [column for column in table if column.leads]
    numbers = Column("#", [str(i + 1) for i in range(len(names))])
    first = [numbers, *table[:keys]]
    figures = sorted(table[keys:], key=lambda column: not column.leads)
    if _needed([*first, *leading]) <= width and _needed(first) <= width * 3 // 5:
        return _filled(first, figures, width)
    room = min(max(width - _needed([numbers, *leading]) - BETWEEN, width // 5), width * 2 // 5)
    label = Column("row", [fitted(name, room) for name in names])
    return _filled([numbers, label], figures, width) + _filled([numbers], table[:keys], width)


def _filled(first: Sequence[Column], columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Distribute columns among tables that begin with the columns `first`, or with row numbers alone if `first` is too wide."""
    found: list[list[Column]] = []
    for column in columns:
        if not found or _needed([*found[-1], column]) > width:
            found.append(list(first if _needed([*first, column]) <= width else first[:1]))
        found[-1].append(column)
    return found


def _needed(columns: Sequence[Column]) -> int:
    return sum(narrowest(column) + BETWEEN for column in columns)

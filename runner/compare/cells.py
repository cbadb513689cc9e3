"""A comparison as a person reads it: titles, cells, and the lines below the table."""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.runner.compare.keys import text
from meshrunner.runner.compare.noise import ALPHA, REPEATS
from meshrunner.runner.compare.parity import LOSS, NORM, TOLERANCE, short
from meshrunner.runner.compare.rows import Against, Comparison, Row
from meshrunner.runner.figures import table_figures

LONGEST_VALUE = 500
"""Characters of a setting; --json and --csv have it whole."""


class Column(NamedTuple):
    """One column of the table."""

    title: str
    cells: list[str]


def columns(comparison: Comparison) -> list[Column]:
    """What names a row first, then figures; a column that is empty in every row is left out."""
    rows = comparison.rows
    found = [Column(key, [_value(row, key) for row in rows]) for key in comparison.keys]
    if not found:
        found.append(Column("run", [row.runs[0].path.name for row in rows]))
    measured = [Column(figure.heading, [figure.cell(row.summaries) for row in rows]) for figure in table_figures()]
    if comparison.baseline:  # a delta beside the speed, a verdict beside the loss
        verdicts = ["" if each is None else str(each.verdict) for each in comparison.against]
        measured.insert(1, Column(f"vs {comparison.baseline[1]}", [_delta(each) for each in comparison.against]))
        measured.append(Column(f"loss vs {comparison.baseline[1]}", verdicts))
    found += measured
    if len({len(row.runs) for row in rows}) > 1:
        found.append(Column("runs", [str(len(row.runs)) for row in rows]))
    if any(row.state != "completed" for row in rows):
        found.append(Column("state", [row.state for row in rows]))
    names = max(len(comparison.keys), 1)
    return [column for i, column in enumerate(found) if i < names or any(column.cells)]


def _value(row: Row, key: str) -> str:
    value = text(row.values[key]) if key in row.values else ""
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."


def _delta(against: Against | None) -> str:
    if against is None or against.wps_pct is None:
        return ""
    marks = {None: " (not tested)", True: " ~", False: ""}
    return f"{against.wps_pct:+.1f}%{marks[against.within_noise]}"


def legend(comparison: Comparison) -> list[str]:
    """What the cells mean, line by line: of the marks and words that occur."""
    against = [each for each in comparison.against if each is not None]
    tested = [each.within_noise for each in against if each.wps_pct is not None]
    lines = []
    test = f"Welch's t-test over the runs' median WPS, p >= {ALPHA:g}"
    if True in tested:
        lines.append(f"~ within noise ({test})")
    if None in tested:
        lines.append(f"not tested: whether it is more than noise takes {REPEATS} completed runs on each side ({test})")
    kinds = {each.verdict.kind for each in against}
    if kinds & {"agrees", "differs"}:
        losses, norms = (
            ", ".join(f"{short(f'{limit[curve]:.0e}')} in {name}" for name, limit in TOLERANCE.items())
            for curve in (LOSS, NORM)
        )
        lines.append(
            f"agrees: the losses' largest relative difference in any step is at most {losses}; gradient norms' {norms}"
        )
    if "within seeds" in kinds:
        lines.append("within seeds: in every step the means differ by less than a standard deviation of the seeds")
    if any(len(row.runs) > 1 for row in comparison.rows):
        lines.append("a row of several runs: the median run, their lowest p10 and highest p90, their highest peaks")
    return lines


def reasons(comparison: Comparison) -> list[str]:
    """One line for every row that is not completed: which, and why."""
    found = []
    for row in [row for row in comparison.rows if row.state != "completed"]:
        name = ", ".join(f"{key}={_value(row, key)}" for key in comparison.keys if key in row.values)
        reason = f": {row.reason}" if row.reason else ""
        found.append(f"{row.state}: {name or row.runs[0].path}{reason}")
    return found

"""Group rows by the values of the keys in `--best-by model,launch.nodes`, and find the best row of each group. A group is a
`Cell`. Its best row is the fastest measured row or, if no row was measured, the fastest row that is predicted to fit."""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

from meshrunner.runner.compare.cells import OTHER
from meshrunner.runner.compare.comparison import MEMORY, WPS, Comparison, other_workload
from meshrunner.runner.compare.keys import text
from meshrunner.runner.compare.runs import Row
from meshrunner.runner.compare.select import fields_of, named
from meshrunner.runner.compare.text_table import Column
from meshrunner.runner.console import one_line
from meshrunner.runner.figures import PREDICTION, Figure, figure_of, number
from meshrunner.runner.rundir import CRASHED, FITTING, RESULTS, VERDICT

WORK = {"matmul": "matmuls", "attention": "attention", "memory": "elementwise work", "optimizer": "the optimizer"}
"""Names of the parts of a step, keyed as in `perf/seconds_by_part`."""


class Candidate(NamedTuple):
    """A row that may be the best of its cell. Measured rows rank first, then rows that fit. Ties are ranked by speed."""

    measured: bool
    fits: bool
    """Whether the run fits into memory; False if the predicted verdict is `borderline`."""
    speed: float
    """Measured value of the figure `Comparison.speed`, or predicted WPS if the row was not measured."""
    row: Row

    def value(self, key: str) -> float | None:
        """Return the measured value of a figure or, if the row was not measured, the predicted value."""
        return number(self.row.figures.get(key) if self.measured else self.row.plan.get(key.removesuffix("_median")))


class Cell(NamedTuple):
    """Rows with equal values of the keys in `Comparison.best_by`."""

    values: tuple[Any, ...]
    """Values of the keys in `Comparison.best_by`."""
    rows: list[Row]
    ranked: list[Candidate]
    """Candidates, the best one first; empty if no row of the cell was measured or is predicted to fit."""


def by(comparison: Comparison, keys: str | None = None) -> Comparison:
    """Return a copy with `best_by` set to `keys`, which are separated by commas, or to `sweep.best_by` if `keys` is None. Raise
    ConfigError for an unknown key."""
    if keys is None:
        option = "sweep.best_by"
        given = next((run.sweep.get(option.partition(".")[2]) for run in comparison.runs if run.sweep), None) or []
    else:
        option, given = "--best-by", keys.split(",")
    fields = fields_of(comparison) if given else {}
    return replace(comparison, best_by=[named(str(key).strip(), fields, option) for key in given])


def cells(comparison: Comparison) -> list[Cell]:
    """Return the cells of a comparison, in the order of its rows."""
    fields = fields_of(comparison) if comparison.best_by else {}
    found: dict[tuple[str, ...], Cell] = {}
    for i, row in enumerate(comparison.rows):
        values = tuple(fields[key].values[i][0] for key in comparison.best_by)
        cell = found.setdefault(tuple(map(text, values)), Cell(values, [], []))
        cell.rows.append(row)
        if (candidate := _candidate(row, comparison.speed)) is not None:
            cell.ranked.append(candidate)
    for cell in found.values():
        cell.ranked.sort(key=lambda each: each[:3], reverse=True)
    return [*found.values()]


def _candidate(row: Row, figure: Figure) -> Candidate | None:
    if row.completed:
        speed = number(row.figures.get(figure.summary_keys[0]))
        return None if speed is None else Candidate(True, True, speed, row)
    wps = number(row.figures.get(PREDICTION + WPS.key))
    verdict = row.counted[0].summary.verdict
    if wps is None or verdict not in FITTING or {run.state for run in row.runs} & (RESULTS | CRASHED):
        return None
    return Candidate(False, verdict == FITTING[0], wps, row)


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns of the table of best rows, with one line for each `Cell`."""
    lines = []
    for cell in cells(comparison):
        line = dict(zip(comparison.best_by, map(text, cell.values), strict=True))
        line["fit"] = f"{len(cell.ranked):,} of {len(cell.rows):,}"
        if cell.ranked:
            best = cell.ranked[0]
            memory = next((gib for key in MEMORY if (gib := best.value(key)) is not None), None)
            unit = "" if best.measured or comparison.speed == WPS else f" {WPS.title}"
            line |= {
                "best": comparison.name(best.row, comparison.best_by),
                comparison.speed.title: comparison.speed.text(best.speed) + unit,
                "is": "measured" if best.measured else "predicted" if best.fits else "predicted, borderline",
                "MFU": figure_of("perf/mfu").text(best.value("perf/mfu_median"), ""),
                "memory": figure_of(MEMORY[0]).text(memory, ""),
                "ahead of": _ahead(cell, comparison),
            }
        else:
            line["best"] = f"none: {_reason(cell)}"
        lines.append(line)
    titles = [*comparison.best_by, "best", comparison.speed.title, "is", "MFU", "memory", "fit", "ahead of"]
    return [Column(title, [line.get(title, "") for line in lines]) for title in titles]


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a JSON object for each `Cell`: the cell's values, the best row's settings and figures, and the second-best row."""
    found = []
    for cell in cells(comparison):
        best, second = [*cell.ranked[:2], None, None][:2]
        found.append(
            {
                **dict(zip(comparison.best_by, cell.values, strict=True)),
                "best": best and best.row.values,
                "measured": best and best.measured,
                "speed": best and best.speed,
                "perf/mfu": best and best.value("perf/mfu_median"),
                VERDICT: best and best.row.counted[0].summary.verdict,
                "second": second and second.row.values,
                "ahead_pct": best and second and 100 * (best.speed / second.speed - 1),
                "why": _ahead(cell, comparison) or None,
                "rows": len(cell.rows),
                "rows_that_fit": len(cell.ranked),
                "reason": None if best else _reason(cell),
            }
        )
    return found


def _reason(cell: Cell) -> str:
    """Return the most frequent reason why rows of a cell have no speed."""
    reasons = (row.reason or row.plan.get("reason") or row.state for row in cell.rows)
    return one_line(Counter(reasons).most_common(1)[0][0])


def _ahead(cell: Cell, comparison: Comparison) -> str:
    """Say how much faster a cell's best row is than the second-best row, and in which part of a step it saves the most time."""
    if len(cell.ranked) < 2 or cell.ranked[0].measured != cell.ranked[1].measured:
        return ""
    best, second = cell.ranked[:2]
    ahead = f"{comparison.name(second.row, comparison.best_by)} by {100 * (best.speed / second.speed - 1):.1f}%"
    if other := other_workload(best.row.runs[0], second.row.runs[0]):
        return f"{ahead} ({OTHER[other]})"
    ours, theirs = _seconds_per_token(best.row), _seconds_per_token(second.row)
    saved = {part: theirs[part] - ours[part] for part in ours.keys() & theirs.keys()}
    part = max(saved, key=saved.__getitem__, default=None)
    return f"{ahead}, mostly in {part}" if part and saved[part] > 0 else ahead


def predicted_seconds(row: Row) -> dict[str, float]:
    """Return the predicted seconds per step of each part in WORK and of exposed communication; {} without a prediction."""
    parts = row.plan.get("perf/seconds_by_part")
    if not isinstance(parts, dict):
        return {}
    seconds = {name: number(parts.get(key)) or 0.0 for key, name in WORK.items()}
    return seconds | {"exposed communication": number(row.plan.get("perf/exposed_communication_s")) or 0.0}


def _seconds_per_token(row: Row) -> dict[str, float]:
    """Return the predicted seconds per token of each part of a step; {} without a prediction."""
    wps, step_s = (number(row.plan.get(f"perf/{key}")) for key in ("wps", "step_time_s"))
    return {name: each / (step_s * wps) for name, each in predicted_seconds(row).items()} if wps and step_s else {}

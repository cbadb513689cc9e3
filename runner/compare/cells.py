"""A comparison as a person reads it: titles, cells, and the lines below the table."""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.runner.compare.keys import text
from meshrunner.runner.compare.noise import ALPHA, REPEATS
from meshrunner.runner.compare.parity import TOLERANCE, short
from meshrunner.runner.compare.rows import WPS, Against, Comparison, Row


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
    found.append(Column("WPS per device (p10-p90)", [_wps(row) for row in rows]))
    if comparison.baseline:
        found.append(Column(f"vs {comparison.baseline[1]}", [_delta(each) for each in comparison.against]))
    found += [
        Column("MFU", _figures(rows, "perf/mfu_median", "{:.1f}%")),
        Column("peak active", [_memory(row, "active") for row in rows]),
        Column("peak reserved", [_memory(row, "reserved") for row in rows]),
        Column("peak RSS", [_rss(row) for row in rows]),
        Column("step time", _figures(rows, "perf/step_time_s_median", "{:.3f} s")),
        Column("time to first step", _figures(rows, "perf/time_to_first_step_s", "{:.1f} s")),
        Column("final loss", [_final_loss(row) for row in rows]),
    ]
    if comparison.baseline:
        verdicts = ["" if each is None else str(each.verdict) for each in comparison.against]
        found.append(Column(f"loss vs {comparison.baseline[1]}", verdicts))
    if len({len(row.runs) for row in rows}) > 1:
        found.append(Column("runs", [str(len(row.runs)) for row in rows]))
    if any(row.state != "completed" for row in rows):
        found.append(Column("state", [row.state for row in rows]))
    names = max(len(comparison.keys), 1)
    return [column for i, column in enumerate(found) if i < names or any(column.cells)]


def _value(row: Row, key: str) -> str:
    return text(row.values[key]) if key in row.values else ""


def _figures(rows: list[Row], key: str, form: str) -> list[str]:
    return ["" if (value := row.figures[key]) is None else form.format(value) for row in rows]


def _wps(row: Row) -> str:
    median, low, high = (row.figures[key] for key in (WPS, "perf/wps_p10", "perf/wps_p90"))
    if median is None:
        return ""
    spread = "" if low is None or high is None else f" ({_speed(low)}-{_speed(high)})"
    return f"{_speed(median)}{spread}"


def _speed(wps: float) -> str:
    return f"{wps:,.0f}" if wps >= 100 else f"{wps:.3g}"


def _delta(against: Against | None) -> str:
    if against is None or against.wps_pct is None:
        return ""
    marks = {None: " (not tested)", True: " ~", False: ""}
    return f"{against.wps_pct:+.1f}%{marks[against.within_noise]}"


def _memory(row: Row, name: str) -> str:
    gib, pct = row.figures[f"memory/peak_{name}_gib"], row.figures[f"memory/peak_{name}_pct"]
    return "" if gib is None else f"{gib:.2f} GiB" + ("" if pct is None else f" ({pct:.2f}%)")


def _rss(row: Row) -> str:
    """Host memory, where there is no device's."""
    gib = row.figures["memory/peak_rss_gib"]
    return f"{gib:.2f} GiB" if gib is not None and row.figures["memory/peak_active_gib"] is None else ""


def _final_loss(row: Row) -> str:
    losses = [loss for run in row.completed or row.runs if (loss := run.figure("train/final_loss")) is not None]
    if not losses:
        return ""
    low, high = f"{min(losses):.4f}", f"{max(losses):.4f}"
    return f"{row.figures['train/final_loss']:.4f}" + (f" ({low}-{high})" if low != high else "")


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
            for curve in ("loss", "grad norm")
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
    for row in comparison.rows:
        if row.state == "completed":
            continue
        name = ", ".join(f"{key}={_value(row, key)}" for key in comparison.keys if key in row.values)
        reason = f": {row.reason}" if row.reason else ""
        found.append(f"{row.state}: {name or row.runs[0].path}{reason}")
    return found

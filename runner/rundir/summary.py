"""Rows of a run -> the one row it contributes to a table. Pure arithmetic over what is on disk, so it can be done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from meshrunner.runner import figures
from meshrunner.runner.rundir.events import StepRow, read_events
from meshrunner.runner.rundir.files import PLAN, SUMMARY, read_json, write_json
from meshrunner.runner.rundir.layouts import Layout, read_layouts, split_by_layout


def _deciles(values: list[float]) -> list[float]:
    return quantiles(values, n=10, method="inclusive") if len(values) > 1 else values


VERDICT = "plan/verdict"
"""The summary key of whether the run was predicted to fit."""
OVER_STEPS: dict[str, Callable[[list[float]], float]] = {
    "median": median,
    "p10": lambda values: _deciles(values)[0],
    "p90": lambda values: _deciles(values)[-1],
    "last": lambda values: values[-1],
    "final": lambda values: values[-1],
    "sum": sum,
}
"""Statistics of `Figure.over_steps` that follow from rows."""
PREDICTED = [each.key for each in figures.FIGURES if each.predicts]
FINAL = [key for figure in figures.FIGURES if figure.over_steps == "final" for key in figure.summary_keys]


def summarise(
    rows: list[StepRow], measure_after: int, started: float, attempt: int, layouts: Sequence[Layout] = ()
) -> dict[str, Any]:
    """
    The summary keys that follow from the rows; null where nothing was measured.

    Of a run that was resumed under another layout, the figures are of the steps under the last one; `earlier_layouts` says what
    the steps before were measured under. `measured_steps` is how many steps count.

    Args:
        rows: one per step, ordered.
        measure_after: first steps of every attempt, which do not count for throughput; steps that compiled, or were slowed by
            a profiler, do not, either.
        started: unix time at which the last attempt began.
        attempt: number of the last attempt; the time to its first step is measured from `started`.
        layouts: the run's, in order.
    """
    current, earlier = split_by_layout(rows, layouts)
    measured = measured_rows(rows, measure_after, current)
    this_attempt = [row for row in rows if row["attempt"] == attempt]
    chosen = {"last": rows[-1:], "final": rows[-1:], "sum": this_attempt}
    found: dict[str, Any] = {
        "steps": rows[-1]["step"] if rows else 0,
        "measured_steps": len(measured),
        "earlier_layouts": earlier,
    }
    for figure in figures.FIGURES:
        if figure.of_some_recipes and not any(figure.key in row for row in rows):
            continue
        for key, statistic in zip(figure.summary_keys, figure.over_steps.split(), strict=True):
            if statistic in OVER_STEPS:
                known = [value for row in chosen.get(statistic, measured) if (value := row.get(figure.key)) is not None]
                found[key] = OVER_STEPS[statistic](known) if known or statistic == "sum" else None
    found["perf/time_to_first_step_s"] = this_attempt[0]["time"] - started if this_attempt else None
    return found


def measured_rows(rows: list[StepRow], measure_after: int, among: Sequence[StepRow] | None = None) -> list[StepRow]:
    """The rows that count for throughput, as `summarise` says; among: only those of one layout."""
    begin: dict[int, int] = {}  # attempt -> its first step: after a checkpoint everything is warmed up once more
    for row in rows:
        begin.setdefault(row["attempt"], row["step"])
    return [
        row
        for row in (rows if among is None else among)
        if row["step"] >= begin[row["attempt"]] + measure_after
        and not row.get("perf/compile_time_s")
        and not row.get("profiled")
    ]


def only_of_completed(summary: dict[str, Any], state: str) -> dict[str, Any]:
    """A summary without the figures that only a completed run has: the loss of a run that broke off is not final."""
    return summary if state == "completed" else summary | dict.fromkeys(FINAL)


def predicted(run_dir: Path) -> dict[str, Any]:
    """The summary keys of what was predicted of a run, all of which begin with `plan/`; {} where nothing was."""
    plan = read_json(run_dir / PLAN)
    if not plan:
        return {}
    keys = {key: figures.number(plan.get(key.removeprefix("plan/"))) for key in PREDICTED}
    return keys | {VERDICT: str(plan.get("verdict"))}


def write_summary(run_dir: Path, measure_after: int, status: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Complete summary.json, which the workers began, with facts and what follows from the run's record; returns it."""
    path = run_dir / SUMMARY
    rows = read_events(run_dir)
    summary = read_json(path) | summarise(
        rows, measure_after, status["started"], status["attempt"], read_layouts(run_dir)
    )
    summary |= predicted(run_dir)
    summary = (
        only_of_completed(summary, status["state"]) | facts | {"state": status["state"], "reason": status["reason"]}
    )
    write_json(path, summary)
    return summary

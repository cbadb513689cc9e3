"""Rows of a run -> the one row it contributes to a table. Pure arithmetic over what is on disk, so it can be done again."""

from __future__ import annotations

from pathlib import Path
from statistics import median, quantiles
from typing import Any

from meshrunner.runner.rundir.events import StepRow, read_events
from meshrunner.runner.rundir.files import SUMMARY, read_json, write_json

MEDIANS = (
    "perf/wps",
    "perf/mfu",
    "perf/mfu_causal",
    "perf/tflops",
    "perf/step_time_s",
    "perf/data_time_s",
    "perf/cpu_time_s",
)


def summarise(rows: list[StepRow], measure_after: int, started: float, attempt: int) -> dict[str, Any]:
    """
    The summary keys that follow from the rows; null where nothing was measured.

    Args:
        rows: one per step, ordered.
        measure_after: first steps of every attempt, which do not count for throughput; steps that compiled, or were slowed by
            a profiler, do not, either.
        started: unix time at which the last attempt began.
        attempt: number of the last attempt; the time to its first step is measured from `started`.
    """
    begin: dict[int, int] = {}  # attempt -> its first step: after a checkpoint everything is warmed up once more
    for row in rows:
        begin.setdefault(row["attempt"], row["step"])
    measured = [
        row
        for row in rows
        if row["step"] >= begin[row["attempt"]] + measure_after
        and not row.get("perf/compile_time_s")
        and not row.get("profiled")
    ]
    found: dict[str, Any] = {"steps": rows[-1]["step"] if rows else 0}
    for key in MEDIANS:
        values = [row[key] for row in measured if row.get(key) is not None]
        found[f"{key}_median"] = median(values) if values else None
    wps = [row["perf/wps"] for row in measured]
    deciles = quantiles(wps, n=10, method="inclusive") if len(wps) > 1 else [wps[0]] * 9 if wps else [None] * 9
    found["perf/wps_p10"], found["perf/wps_p90"] = deciles[0], deciles[-1]
    last = rows[-1] if rows else {}
    found |= {key: last.get(key) for key in _memory_keys(last)}
    found["train/final_loss"] = last.get("train/loss")
    found["perf/compile_time_s"] = sum(row.get("perf/compile_time_s", 0.0) for row in rows if row["attempt"] == attempt)
    first = next((row for row in rows if row["attempt"] == attempt), None)
    found["perf/time_to_first_step_s"] = first["time"] - started if first else None
    return found


def _memory_keys(row: StepRow) -> list[str]:
    return [key for key in row if key.startswith("memory/")]


def write_summary(run_dir: Path, measure_after: int, status: dict[str, Any]) -> dict[str, Any]:
    """Complete summary.json, which the workers began, from what the run has recorded so far; returns it."""
    path = run_dir / SUMMARY
    rows = read_events(run_dir)
    summary = read_json(path) | summarise(rows, measure_after, status["started"], status["attempt"])
    summary |= {"state": status["state"], "reason": status["reason"]}
    write_json(path, summary)
    return summary

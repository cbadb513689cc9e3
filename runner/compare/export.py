"""A comparison for programs: the rows with raw figures, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from meshrunner.runner.compare.keys import text
from meshrunner.runner.compare.rows import WPS, Comparison, Row
from meshrunner.runner.compare.runs import Run


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """
    One flat object per row: the varying keys, state and reason, the figures under their names in summary.json.

    Against the baseline's row: `wps_vs_baseline_pct`, `p_value` and `within_noise` (null: not tested), `loss_verdict`
    (null: none, `loss_why` says why), `loss_max_relative_difference`, `loss_differs_from_step`. `runs` lists the repeats.
    """
    found = []
    for row, against in zip(comparison.rows, comparison.against, strict=True):
        record: dict[str, Any] = {key: row.values.get(key) for key in comparison.keys}
        record |= {"state": row.state, "reason": row.reason, **row.figures}
        verdict = against.verdict if against else None
        if comparison.baseline:
            record |= {
                "baseline": "=".join(comparison.baseline) if against else None,
                "wps_vs_baseline_pct": against.wps_pct if against else None,
                "p_value": against.p_value if against else None,
                "within_noise": against.within_noise if against else None,
                "loss_verdict": verdict.kind or None if verdict else None,
                "loss_max_relative_difference": verdict.difference if verdict else None,
                "loss_differs_from_step": verdict.step if verdict else None,
                "loss_why": verdict.why or None if verdict else _alone(row, *comparison.baseline),
            }
        record["runs"] = [_run(run) for run in row.runs]
        found.append(record)
    return found


def _alone(row: Row, key: str, value: str) -> str:
    return "it is a baseline" if text(row.values.get(key)) == value else "no row is equal in all other varying keys"


def _run(run: Run) -> dict[str, Any]:
    return {
        "directory": str(run.path),
        "state": run.state,
        "reason": run.reason,
        "seed": run.seed,
        "earlier_layouts": run.summary.get("earlier_layouts") or [],
        WPS: run.figure(WPS),
        "train/final_loss": run.figure("train/final_loss"),
    }


def as_json(comparison: Comparison) -> str:
    """A list of rows."""
    return json.dumps(records(comparison), indent=2, allow_nan=False, default=str)


def as_csv(comparison: Comparison) -> str:
    """A line per row, a title per column; directories of repeats separated by spaces, what is unknown empty."""
    rows = records(comparison)
    for row in rows:
        row["runs"] = " ".join(run["directory"] for run in row["runs"])
        for key in comparison.keys:
            row[key] = "" if row[key] is None else text(row[key])
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().rstrip("\n")

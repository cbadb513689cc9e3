"""Export a comparison for programs: rows with unrounded figures, as JSON and as CSV."""

import csv
import io
import json
from typing import Any

from meshrunner.runner.compare import best
from meshrunner.runner.compare.comparison import NO_BASELINE, WPS, Against, Comparison, percent_more
from meshrunner.runner.compare.keys import emulated, text
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.console import printable
from meshrunner.runner.rundir import VERDICT


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a flat object for each row: the varying keys, the state, the reason, and the figures, named as in summary.json.

    `scaling_pct` is present if rows differ in the number of devices, and `plan/verdict` is present if a run was predicted. The
    key `emulated` is present if a run emulated a rank. If there is a baseline, `speed` is the key of the figure to which
    `speed_vs_baseline_pct`, `p_value` and `within_noise` refer. `p_value` and `within_noise` are null if the difference is not
    tested. `loss_why` explains a null `loss_verdict`. `runs` lists the repeats.
    """
    found = []
    scales = any(each is not None for each in comparison.scaling)
    visible = comparison.noise.visible()
    emulates = any(emulated(row.runs[0]) for row in comparison.rows)
    planned = any(run.summary.verdict is not None for row in comparison.rows for run in row.counted)
    for row, against, scaling in zip(comparison.rows, comparison.against, comparison.scaling, strict=True):
        record: dict[str, Any] = {key: row.values.get(key) for key in comparison.keys}
        record |= {"emulated": emulated(row.runs[0])} if emulates else {}
        record |= {"state": row.state, "reason": row.reason, **row.figures}
        record |= {"scaling_pct": scaling} if scales else {}
        record |= {VERDICT: row.counted[0].summary.verdict} if planned else {}
        if comparison.baseline:
            verdict = against.verdict if against else None
            alone = "this row is a baseline" if comparison.is_baseline(row) else NO_BASELINE
            record |= {
                "baseline": "=".join(comparison.baseline) if against else None,
                "wps_vs_baseline_pct": percent_more(row.measured(WPS), against.row.measured(WPS)) if against else None,
                "speed": comparison.speed.summary_keys[0],
                "speed_vs_baseline_pct": against.speed.percent if against else None,
                "p_value": against.speed.p_value if against else None,
                "within_noise": against.speed.within_noise if against else None,
                "smallest_visible_pct": visible,
                **_further(against, comparison),
                "loss_verdict": verdict.kind or None if verdict else None,
                "loss_max_relative_difference": verdict.difference if verdict else None,
                "loss_differs_from_step": verdict.step if verdict else None,
                "held_out_loss_verdict": against.held_out.kind or None if against else None,
                "held_out_loss_max_relative_difference": against.held_out.difference if against else None,
                "loss_why": verdict.why or None if verdict else alone,
            }
        record["runs"] = [_run(run) for run in row.runs]
        found.append(record)
    return found


def _further(against: Against | None, comparison: Comparison) -> dict[str, Any]:
    """Return the gains in all compared figures except the speed, under keys such as `memory/peak_rss_gib_vs_baseline_pct`."""
    keys = next((each.further for each in comparison.against if each), {})
    found: dict[str, Any] = {}
    for key in keys:
        gain = against and against.further[key]
        found |= {f"{key}_vs_baseline_pct": gain and gain.percent, f"{key}_p_value": gain and gain.p_value}
    return found


def _run(run: Run) -> dict[str, Any]:
    return {
        "directory": str(run.path),
        "state": run.state,
        "reason": run.reason,
        "seed": run.seed,
        "earlier_layouts": [each.as_json() for each in run.summary.earlier_layouts],
        WPS.summary_keys[0]: run.figures.get(WPS.summary_keys[0]),
        "train/final_loss": run.figures.get("train/final_loss"),
    }


def as_json(comparison: Comparison) -> str:
    """Return the rows as a JSON list. If `best_by` is set, return only the best row of each cell (see `best.Cell`)."""
    found = best.records(comparison) if comparison.best_by else records(comparison)
    # JSON has no infinity and no NaN. A setting with such a value becomes text.
    finite = json.loads(json.dumps(found, default=str), parse_constant=str)
    # DEL is the only control character that JSON does not escape.
    return json.dumps(finite, indent=2).replace("\x7f", "\\u007f")


def as_csv(comparison: Comparison) -> str:
    """Return CSV with a header. The column `runs` lists directories, separated by spaces. Unknown values are empty."""
    rows = records(comparison)
    for row in rows:
        row["runs"] = " ".join(run["directory"] for run in row["runs"])
        for key in comparison.keys:
            row[key] = "" if row[key] is None else text(row[key])
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return printable(file.getvalue()).rstrip("\n")

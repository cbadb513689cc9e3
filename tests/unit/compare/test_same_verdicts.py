"""The terminal, Markdown, JSON, CSV, the page, W&B and `meshrunner.load` say the same verdicts."""

from __future__ import annotations

import csv
import html
import io
import json
from pathlib import Path

import pytest

from meshrunner import load
from meshrunner.runner.compare.comparison import compare_sweep
from meshrunner.runner.compare.export import as_csv, as_json
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.table import markdown, print_table
from meshrunner.runner.trackers.description import SweepRecord
from tests.run_dirs import make_run, write

ROWS = (("fsdp1", 100.0, 5.0, 40.0), ("fsdp2", 110.0, 5.0, 30.0), ("hsdp2", 100.5, 5.5, 40.0))


def test_every_form_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    names = []
    for i, (layout, wps, loss, gib) in enumerate(ROWS):
        for repeat in (1, 2, 3):
            names.append(f"00{i}_{layout}_repeat-{repeat}")
            make_run(
                sweep / names[-1],
                f"parallelism.kind={layout}",
                "sweep.baseline=parallelism.kind=fsdp1",
                "sweep.repeat=3",
                wps=wps + 5 * repeat + (i * repeat) % 2,
                losses=(6.0, loss, 4.0),
                summary={"memory/peak_active_gib": gib, "memory/peak_reserved_gib": gib + 1},
            )
    write(sweep / "sweep.json", {"jobs": [{"name": name, "overrides": []} for name in names]})
    comparison, problem = compare_sweep(sweep)
    assert problem is None
    rows = json.loads(as_json(comparison))
    assert [row["within_noise"] for row in rows] == [None, False, True]
    assert [row["loss_verdict"] for row in rows] == [None, "identical", "differs"]
    sentences = findings(comparison)
    assert sentences[0].startswith("Fastest: fsdp2") and "Losses differ in 1 of 2 pairs: hsdp2." in sentences

    page = tmp_path / "page.html"
    write_page(comparison, page)
    shown = {"Markdown": markdown(comparison), "page": html.unescape(page.read_text().partition("<script")[0])}
    monkeypatch.setattr("meshrunner.runner.compare.table.on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "400")
    print_table(comparison)
    shown["terminal"] = capsys.readouterr().out
    for form, text in shown.items():
        for row, mark in zip(rows[1:], ("", " ~"), strict=True):
            assert f"{row['speed_vs_baseline_pct']:+.1f}%{mark}" in text, form
        for sentence in sentences:
            assert sentence in text, form
        assert "identical" in text and "differs from step 2 on" in text, form

    recorded = SweepRecord.load(sweep)
    assert recorded.findings == sentences
    assert json.loads(json.dumps(recorded.rows)) == rows
    frame = load(sweep).rows
    for key in ("speed_vs_baseline_pct", "p_value", "within_noise", "loss_verdict"):
        expected = [row[key] for row in rows]
        assert [None if value != value else value for value in frame[key]] == expected, key
        written = [row[key] for row in csv.DictReader(io.StringIO(as_csv(comparison)))]
        assert written == ["" if value is None else str(value) for value in expected], key

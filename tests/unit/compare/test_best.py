"""`--best-by` and `sweep.best_by`: the best row of each cell, measured or predicted, in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.best import by, cells, columns
from meshrunner.runner.compare.comparison import Comparison, compare_runs
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.verbs.records.compare import compare
from tests.run_dirs import make_run, write


def predict(run: Path, wps: float | None, verdict: str = "fits", reason: str = "", **parts: float) -> None:
    """Write a prediction. parts: seconds of a step of one second."""
    exposed = parts.pop("exposed", 0.0)
    speed: dict[str, Any] = {"perf/wps": wps, "perf/step_time_s": 1.0, "perf/seconds_by_part": parts, "perf/mfu": 40.0}
    memory = {"memory/peak_reserved_gib": 60.0, "memory/peak_active_gib": 50.0}
    write(
        run / "plan.json",
        {"verdict": verdict, "reason": reason} | speed | memory | {"perf/exposed_communication_s": exposed},
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """On 1, 2 and 4 nodes: measured runs beside a faster prediction, predictions alone, and nothing that fits."""
    for nodes in (1, 2, 4):
        for layout in ("fsdp1", "fsdp2"):
            for recompute in ("none", "full"):
                state = "completed" if nodes == 1 and layout == "fsdp2" else "pending"
                wps = 100.0 if recompute == "none" else 80.0
                run = make_run(
                    tmp_path / f"{nodes}-{layout}-{recompute}",
                    *(f"launch.nodes={nodes}", f"parallelism={layout}", f"activation_checkpoint={recompute}"),
                    wps=wps if state == "completed" else None,
                    losses=(6.0, 5.0) if state == "completed" else None,
                    state=state,
                    summary={"perf/mfu_median": 35.0, "memory/peak_reserved_gib": 55.0}
                    if state == "completed"
                    else None,
                )
                fits = nodes < 4 and (nodes, recompute) != (2, "none")
                again = 0.2 if recompute == "full" else 0.0
                predict(
                    run,
                    110.0 - 10 * (recompute == "full") - 2 * (layout == "fsdp1"),
                    "fits" if fits else "does not fit",
                    "" if fits else "90 GiB of the 78 GiB available",
                    matmul=0.4 + again,
                    exposed=0.1 + 0.05 * (layout == "fsdp1"),
                )
    return tmp_path


def divided(sweep: Path, keys: str = "launch.nodes") -> Comparison:
    return by(compare_runs(read_runs([sweep])), keys)


def test_a_measured_row_precedes_predictions_and_nothing_that_does_not_fit_is_best(sweep: Path) -> None:
    one, two, four = cells(divided(sweep))
    assert [cell.values for cell in (one, two, four)] == [(1,), (2,), (4,)]
    assert [each.measured for each in one.ranked] == [True, True, False, False] and len(one.rows) == 4
    assert one.ranked[0].speed == 100.0 and one.ranked[0].row.values["parallelism"] == "fsdp2"
    assert [(each.measured, each.speed) for each in two.ranked] == [(False, 100.0), (False, 98.0)]
    assert four.ranked == []


def test_the_table_says_why(sweep: Path) -> None:
    table = {column.title: column.cells for column in columns(divided(sweep, "nodes"))}
    assert table["launch.nodes"] == ["1", "2", "4"]
    assert table["best"] == ["fsdp2 none", "fsdp2 full", "none: 90 GiB of the 78 GiB available"]
    assert table["is"] == ["measured", "predicted", ""]
    assert table["MFU"] == ["35.0%", "40.0%", ""] and table["memory"] == ["55.00 GiB", "60.00 GiB", ""]
    assert table["fit"] == ["4 of 4", "2 of 4", "0 of 4"]
    assert table["ahead of"] == [
        "fsdp2 full by 25.0%, mostly in matmuls",
        "fsdp1 full by 2.0%, mostly in exposed communication",
        "",
    ]


def test_a_run_that_failed_or_fits_only_just_is_not_preferred(sweep: Path) -> None:
    write(sweep / "2-fsdp2-full" / "status.json", {"state": "oom", "reason": "rank 0", "attempt": 1, "started": 1.0})
    predict(sweep / "2-fsdp2-none", 500.0, "borderline")
    best, second = cells(divided(sweep))[1].ranked
    assert best.row.values["parallelism"] == "fsdp1" and best.fits
    assert second.row.values["activation_checkpoint"] == "none" and not second.fits


def test_every_form_has_the_cells(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = sweep / "page.html"
    assert compare([str(sweep), "--best-by", "launch.nodes,parallelism", "--markdown", f"--html={page}"]) == 0
    said = capsys.readouterr().out
    first, *_ = said.split("\n\n")
    assert len(first.splitlines()) == 2 + 6 and "| 1            | fsdp2       | none " in first
    assert "<h2>Best rows by launch.nodes and parallelism</h2>" in page.read_text()
    assert '"best_by":["launch.nodes","parallelism"]' in page.read_text()
    assert compare([str(sweep), "--best-by=launch.nodes", "--json"]) == 0
    one, two, four = json.loads(capsys.readouterr().out)
    assert (
        one["best"] == {"parallelism": "fsdp2", "activation_checkpoint": "none", "launch.nodes": 1} and one["measured"]
    )
    assert two["speed"] == 100.0 and not two["measured"] and round(two["ahead_pct"], 2) == 2.04
    assert four["best"] is None and four["reason"] == "90 GiB of the 78 GiB available" and four["rows_that_fit"] == 0
    assert compare([str(sweep)]) == 0
    assert "best" not in capsys.readouterr().out.split("\n")[0]


def test_an_unknown_key_is_refused(sweep: Path) -> None:
    with pytest.raises(ConfigError, match=r"--best-by: there is no key 'node'. Did you mean 'nodes'\?"):
        divided(sweep, "model,node")


def test_a_sweep_may_name_its_keys(sweep: Path) -> None:
    for run in sweep.iterdir():
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(config | {"sweep": {"best_by": ["nodes"]}}))
    assert by(compare_runs(read_runs([sweep]))).best_by == ["launch.nodes"]


def test_speeds_on_cpus_are_those_that_tables_compare_and_another_batch_is_marked(tmp_path: Path) -> None:
    for layout, wps, cpu, batch in (("fsdp1", 120.0, 60.0, 8), ("fsdp2", 100.0, 70.0, 4)):
        figures = {f"perf/tokens_per_cpu_s_{name}": cpu for name in ("median", "p10", "p90")}
        make_run(tmp_path / layout, f"parallelism={layout}", f"global_batch={batch}", wps=wps, summary=figures)
    table = {column.title: column.cells for column in columns(divided(tmp_path, "model.dim"))}
    assert table["best"] == ["fsdp2 global_batch=4"] and table["tokens per CPU-second"] == ["70"]
    assert table["ahead of"] == ["fsdp1 global_batch=8 by 16.7% (other batch)"]

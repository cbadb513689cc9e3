"""`meshrunner why` on runs made by hand."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.page.charted import as_json
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.rundir import Explanation
from meshrunner.runner.rundir.files import EXPLANATION, PLAN, write_json
from meshrunner.runner.verbs.records.compare import compare
from meshrunner.runner.verbs.records.why import why
from tests.run_dirs import make_run

STEP = {"forward matmul": 0.2, "backward matmul": 0.4, "exposed all_gather": 0.1, "host": 0.05}


def traced(folder: Path, *overrides: str, step_time: float, error: float = 0.01, **lines: float) -> Path:
    """Make a run whose step takes `step_time`, and whose traced step differs from STEP in the given lines."""
    make_run(folder, *overrides, summary={"perf/step_time_s_median": step_time, "perf/wps_error": error, "steps": 4})
    found = STEP | {name.replace("_", " ", 1): seconds for name, seconds in lines.items()}
    Explanation.model_validate({"steps": (3, 4), "seconds": {name: [each] for name, each in found.items()}}).write(
        folder / EXPLANATION
    )
    return folder


def planned(folder: Path, plan: dict[str, Any], **categories: float) -> None:
    """Write a prediction, with its GiB of memory by category."""
    parts = {"matmul": 0.5, "attention": 0.1, "memory": 0.2, "optimizer": 0.05, "communication": 0.6}
    plan = {"verdict": "fits", "perf/seconds_by_part": parts, "memory/by_category_gib": categories, **plan}
    write_json(folder / PLAN, plan)


def explained(*folders: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert why([str(each) for each in folders]) == 0
    return capsys.readouterr().out


def test_the_line_that_grew_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = traced(tmp_path / "a", step_time=0.75)
    row = traced(tmp_path / "b", "parallelism=fsdp1", step_time=0.85, exposed_all_gather=0.2)
    said = explained(base, row, capsys=capsys)
    assert (
        "fsdp1 is 13.3% slower than fsdp2 (0.100 s per step): 0.100 s more exposed all_gather; compute is equal" in said
    )
    said = explained(row, base, capsys=capsys)
    assert (
        "fsdp2 is 11.8% faster than fsdp1 (0.100 s per step): 0.100 s less exposed all_gather; compute is equal" in said
    )


def test_lines_add_up_to_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = random.Random(0)
    for i in range(20):
        times = [generator.uniform(0.5, 2) for _ in range(2)]
        lines = [{name.replace(" ", "_", 1): generator.random() for name in STEP} for _ in range(2)]
        base = traced(tmp_path / f"{i}a", step_time=times[0], **lines[0])
        row = traced(tmp_path / f"{i}b", "seed=1", step_time=times[1], **lines[1])
        assert why([str(base), str(row), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert math.fsum(line["difference"] for line in found["lines"]) == pytest.approx(times[1] - times[0], abs=1e-9)


def test_a_traced_run_is_compared_with_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = traced(tmp_path / "a", step_time=0.9, exposed_all_gather=0.25)
    plan = {"perf/step_time_s": 0.7, "perf/exposed_communication_s": 0.05, "perf/error_pct": 5.0}
    with pytest.raises(ConfigError, match="has no predicted speed"):
        why([str(run)])
    planned(run, plan | {"perf/seconds_by_part": {"matmul": 0.6, "attention": 0.0, "memory": 0.05, "optimizer": 0.0}})
    said = explained(run, capsys=capsys)
    assert "is 28.6% slower than its prediction (+-5%) (0.200 s per step): 0.200 s more exposed communication" in said
    assert why([str(run), "--json"]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["matmuls"]["own"] == pytest.approx(lines["matmuls"]["base"]) == 0.6
    assert math.fsum(line["difference"] for line in lines.values()) == pytest.approx(0.2, abs=1e-9)
    planned(run, plan | {"perf/error_pct": 30.0})
    assert "no cause is named" in explained(run, capsys=capsys)


def test_no_cause_is_named_within_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = traced(tmp_path / "a", step_time=0.75)
    row = traced(tmp_path / "b", step_time=0.76, forward_matmul=0.21)
    said = explained(base, row, capsys=capsys)
    assert "do not differ by more than noise (+1.3% step time), so no cause is named" in said
    equal = traced(tmp_path / "c", "seed=1", step_time=0.75, error=0.0)
    assert "do not differ by more than noise (+0.0% step time)" in explained(base, equal, capsys=capsys)


def test_a_difference_that_no_trace_shows_has_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = traced(tmp_path / "a", step_time=0.75)
    row = traced(tmp_path / "b", "parallelism=fsdp1", step_time=0.8, forward_matmul=0.5)
    assert "(50.00 ms per step), but the ledger does not explain the difference" in explained(base, row, capsys=capsys)


def test_a_trace_of_fewer_steps_than_the_run_has_is_out_of_date(tmp_path: Path) -> None:
    base, row = traced(tmp_path / "a", step_time=0.75), traced(tmp_path / "b", "seed=1", step_time=0.85)
    Explanation.model_validate({"steps": (1, 2), "seconds": {"host": [0.1]}}).write(row / EXPLANATION)
    with pytest.raises(ConfigError, match=r"no trace of .*/b \(completed\)"):
        why([str(base), str(row)])


def test_without_traces_the_prediction_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, exposed in (("a", 0.1), ("b", 0.3)):
        folder = make_run(tmp_path / name, f"parallelism=fsdp{1 + (name == 'a')}")
        planned(folder, {"perf/exposed_communication_s": exposed, "perf/step_time_s": 0.9 + exposed})
    said = explained(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert (
        "fsdp1 is predicted to be 20.0% slower than fsdp2 (0.200 s per step): 0.200 s more exposed communication"
        in said
    )
    assert "at least one row was not traced" in said


def test_the_category_that_needs_more_memory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = traced(tmp_path / "a", step_time=0.75)
    row = traced(tmp_path / "b", "parallelism=fsdp1", step_time=0.85, exposed_all_gather=0.2)
    planned(base, {"memory/phase": "backward of block 3"}, parameters=1.0, activations=2.0)
    planned(row, {"memory/phase": "loss"}, parameters=1.0, activations=2.25, unsharded=0.5)
    said = explained(base, row, capsys=capsys)
    assert (
        "fsdp1 is predicted to need 0.75 GiB more memory than fsdp2 at the peak (+25.0%): 0.50 GiB more unsharded, "
        "0.25 GiB more activations; the peak is in loss instead of backward of block 3" in said
    )
    assert why([str(base), str(row), "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert math.fsum(line["difference"] for line in memory["lines"]) == 0.75 and not memory["measured"]
    said = explained(base, traced(tmp_path / "c", "seed=1", step_time=0.85), capsys=capsys)
    assert "memory" not in said, "the prediction of one run is unknown"


def test_measured_categories_precede_predicted_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for name in ("fsdp2", "fsdp1"):
        live = {"memory/live_logits_gib": 0.5, "memory/live_parameters_gib": 1.5}
        folder = make_run(tmp_path / name, f"parallelism={name}", summary=live)
        planned(folder, {"perf/exposed_communication_s": 0.1, "perf/step_time_s": 1.0}, parameters=9.0)
        folders.append(folder)
    assert "fsdp1 needs as much memory as fsdp2 (2.00 GiB at the peak)" in explained(*folders, capsys=capsys)


def test_modules_that_differ_most_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = traced(tmp_path / "a", step_time=0.75)
    row = traced(tmp_path / "b", "parallelism=fsdp1", step_time=0.85, forward_matmul=0.3)
    for folder, more in ((base, 0.0), (row, 0.03)):
        trace = Explanation.read(folder / EXPLANATION)
        modules = {f"blocks.{i}.mlp.w1": 0.02 + more for i in range(3)} | {
            "blocks.1.wq": 0.01 + more / 3,
            "blocks.2.wq": 0.01,
        }
        trace.model_copy(update={"modules": modules}).write(folder / EXPLANATION)
    said = explained(base, row, capsys=capsys)
    assert "Modules whose compute differs most: blocks.*.mlp.w1 (+90.00 ms), blocks.1.wq (+10.00 ms)" in said


def test_the_page_holds_the_ledgers_of_each_row(tmp_path: Path) -> None:
    base, row = traced(tmp_path / "a", step_time=0.75), traced(tmp_path / "b", "parallelism=fsdp1", step_time=0.85)
    planned(row, {"memory/phase": "loss"}, parameters=1.0, activations=2.25)
    found = json.loads(as_json(compare_runs(read_runs([base, row]))))
    steps = [each["ledgers"]["seconds per step"] for each in found["rows"]]
    assert [math.fsum(step.values()) for step in steps] == pytest.approx([0.75, 0.85])
    assert found["rows"][1]["ledgers"]["GiB at the peak"] == {"parameters": 1.0, "activations": 2.25}
    assert (
        found["groups"]["exposed all_gather"] == "exposed communication"
        and "GiB at the peak" not in found["rows"][0]["ledgers"]
    )


def test_compare_explains_each_row_against_its_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced(tmp_path / "a", step_time=0.75)
    traced(tmp_path / "b", "parallelism=fsdp1", step_time=0.85, exposed_all_gather=0.2)
    make_run(tmp_path / "c", "parallelism=fsdp1_tp")
    folders = [str(tmp_path / name) for name in "abc"]
    assert compare([*folders, "--baseline", "parallelism=fsdp2", "--why"]) == 0
    said = capsys.readouterr().out
    with pytest.raises(ConfigError, match="--why: no row has a baseline; add --baseline KEY=VALUE"):
        compare([*folders, "--why"])
    assert "fsdp1 is 13.3% slower than fsdp2 (0.100 s per step): 0.100 s more exposed all_gather" in said
    assert "why: no trace of fsdp1_tp (completed), and at least one of the compared runs has no prediction" in said


def test_runs_without_traces_and_predictions_are_refused(tmp_path: Path) -> None:
    base, row = make_run(tmp_path / "a"), make_run(tmp_path / "b", "seed=1")
    with pytest.raises(
        ConfigError,
        match=r"no trace of .*/a \(completed\) and .*/b \(completed\), and at least one of the compared runs has no "
        r"prediction; use sweep\.explain=true",
    ):
        why([str(base), str(row)])
    with pytest.raises(ConfigError, match="is not a run directory"):
        why([str(tmp_path), str(row)])
    with pytest.raises(ConfigError, match="runs of the same row"):
        why([str(base), str(base)])

"""`meshrunner why` on runs made by hand."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.rundir import Explanation
from meshrunner.runner.rundir.files import EXPLANATION, PLAN, write_json
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


def test_no_cause_is_named_within_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = traced(tmp_path / "a", step_time=0.75)
    row = traced(tmp_path / "b", step_time=0.76, forward_matmul=0.21)
    assert "do not differ beyond noise (+1.3% step time), so no cause is named" in explained(base, row, capsys=capsys)
    equal = traced(tmp_path / "c", "seed=1", step_time=0.75, error=0.0)
    assert "do not differ beyond noise (+0.0% step time)" in explained(base, equal, capsys=capsys)


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
        parts = {"matmul": 0.5, "attention": 0.1, "memory": 0.2, "optimizer": 0.05, "communication": 0.6}
        plan = {"perf/seconds_by_part": parts, "perf/exposed_communication_s": exposed}
        write_json(folder / PLAN, {"verdict": "fits", "perf/step_time_s": 0.9 + exposed, **plan})
    said = explained(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert (
        "fsdp1 is predicted to be 20.0% slower than fsdp2 (0.200 s per step): 0.200 s more exposed communication"
        in said
    )
    assert "at least one row was not traced" in said


def test_runs_without_traces_and_predictions_are_refused(tmp_path: Path) -> None:
    base, row = make_run(tmp_path / "a"), make_run(tmp_path / "b", "seed=1")
    with pytest.raises(
        ConfigError,
        match=r"no trace of .*/a \(completed\) and .*/b \(completed\), and at least one of the two runs has no "
        r"prediction; use sweep\.explain=true",
    ):
        why([str(base), str(row)])
    with pytest.raises(ConfigError, match="is not a run directory"):
        why([str(tmp_path), str(row)])
    with pytest.raises(ConfigError, match="runs of the same row"):
        why([str(base), str(base)])

"""What is predicted of runs before they begin, and what becomes of those that cannot fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import TINY, meshrunner, read, run, status

LARGE = 16384
"""Sequences of a micro batch whose logits alone take more than a worker of TIGHT has; nobody ever makes them."""
TIGHT = ("sweep.preflight=skip", "launch.host_memory_gib=0.5")


@pytest.mark.slow
def test_what_cannot_fit_is_a_skipped_row(folder: Path) -> None:
    arguments = ("run", "-m", *TINY, *TIGHT, f"micro_batch={LARGE},1", "hydra.sweep.dir=sweep")
    assert meshrunner(*arguments, cwd=folder).code == 0
    large, small = sorted((folder / "sweep").glob("0*"))
    assert [status(each)["state"] for each in (large, small)] == ["skipped", "completed"]
    assert status(large)["reason"].startswith("predicted not to fit: ")
    assert "GiB active of the 0.50 GiB" in status(large)["reason"]
    assert [read(each / "plan.json")["verdict"] for each in (large, small)] == ["does not fit", "fits"]
    summary = read(small / "summary.json")
    assert summary["plan/verdict"] == "fits"
    assert summary["plan/memory/peak_active_gib"] == read(small / "plan.json")["memory/peak_active_gib"]
    again = meshrunner(*arguments, cwd=folder)
    assert again.code == 0, again
    assert [status(each)["state"] for each in (large, small)] == ["skipped", "completed"]


@pytest.mark.slow
def test_a_prediction_that_fails_stops_nothing(folder: Path) -> None:
    """Nor does one that takes its process with it."""
    broken = ("model.kind=faulty:Raises,faulty:Exits", "+model.step=2")
    ended = meshrunner("run", "-m", *TINY, *TIGHT, *broken, "hydra.sweep.dir=sweep", cwd=folder)
    assert (
        ended.code == 1
        and "2 of 2 combinations could not be predicted; starting them anyway. First error: " in ended.err
    ), ended
    assert [status(each)["state"] for each in sorted((folder / "sweep").glob("0*"))] == ["failed"] * 2


@pytest.mark.slow
def test_a_single_run_is_only_warned_of(folder: Path) -> None:
    ended = run("sweep.preflight=skip", "launch.host_memory_gib=1e-6", cwd=folder)
    assert ended.code == 1 and ended.err.count("meshrunner: predicted not to fit: ") == 1, ended
    assert status(folder / "out")["state"] in ("oom", "failed")
    assert read(folder / "out" / "plan.json")["verdict"] == "does not fit"


@pytest.mark.slow
def test_runs_on_named_hardware_are_warned_of(folder: Path) -> None:
    gpu = ("hardware=h100_96gb", "seq_len=4096", "micro_batch=1,65536", "hydra.sweep.dir=sweep")
    ended = meshrunner("place", "-m", *TINY, *gpu, cwd=folder)
    assert ended.code == 0, ended
    assert "001_micro-batch-65536: predicted not to fit: " in ended.err and "000_" not in ended.err, ended
    for each in sorted((folder / "sweep").glob("0*")):
        assert status(each)["state"] == "pending" and read(each / "plan.json")["perf/wps"], each


@pytest.mark.slow
def test_what_is_left_out_of_jobs_is_said(folder: Path) -> None:
    gpu = ("hardware=h100_96gb", "seq_len=4096", "sweep.preflight=skip")
    ended = meshrunner("submit", "--dry-run", "-m", *TINY, *gpu, "micro_batch=32768,65536", cwd=folder)
    assert ended.code == 0 and ended.out == "", ended
    assert ended.err.count(": predicted not to fit: ") == 2
    assert "skipping these combinations (sweep.preflight=skip)" in ended.err
    ended = meshrunner("submit", "--dry-run", *TINY, *gpu, "micro_batch=65536", cwd=folder)
    assert ended.code == 0 and ended.out.startswith("#!"), ended
    assert "meshrunner: predicted not to fit: " in ended.err


@pytest.mark.slow
def test_a_command_of_its_own_plans_float8_in_compiled_code(folder: Path) -> None:
    """In a process that has not imported the compiler before tracing begins."""
    wide = ("model.dim=64", "model.ffn_dim=128", "hardware=h100_80gb", "precision=float8", "compile=per_block")
    ended = meshrunner("plan", *TINY, *wide, "--active", cwd=folder)
    assert ended.code == 0 and ended.out.startswith("fits: "), ended


@pytest.mark.slow
def test_a_placed_run_on_named_hardware_is_predicted(folder: Path) -> None:
    ended = meshrunner("place", *TINY, "hardware=h100_96gb", "hydra.run.dir=out", cwd=folder)
    assert ended.code == 0, ended
    assert read(folder / "out" / "plan.json")["verdict"] == "fits"


@pytest.mark.slow(sampled=True)
def test_a_grid_is_ranked(folder: Path) -> None:
    grid = (f"micro_batch={LARGE},1", "parallelism.tensor=1,3", "launch.host_memory_gib=0.5")
    ended = meshrunner("plan", "-m", *TINY, *grid, "--active", "--json", cwd=folder)
    assert ended.code == 0, ended
    ranked = json.loads(ended.out)
    assert [each["verdict"] for each in ranked] == ["fits", "does not fit", "skipped", "skipped"]
    assert {f"micro_batch={LARGE}", "hardware=cpu"} < set(ranked[1]["overrides"])
    assert list(ranked[2]) == list(ranked[0]) and ranked[2]["memory/peak_active_gib"] is None
    assert "tensor(3)" in ranked[2]["reason"] and ranked[0]["memory/peak_active_gib"] < 0.5
    assert sorted(each.name for each in folder.iterdir() if not each.name.startswith(".")) == ["faulty.py"]

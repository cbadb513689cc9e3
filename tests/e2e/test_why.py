"""`sweep.explain` and `meshrunner why`: planted causes of a slower step are named."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import Command, read, run

pytestmark = pytest.mark.usefixtures("cache")
STEPS = ("steps=9", "measure_after=2", "launch.workers=1", "parallelism=single", "sweep.explain=true")
CAUSES = {
    "model.kind=slower:ExtraMatmul": "forward matmul",
    "data.kind=slower:SlowData": "data",
    "optimizer.kind=slower:StallingAdamW": "host in optimizer",
}


def explained(folder: Path, base: str, row: str) -> dict[str, Any]:
    with Command("why", base, row, "--json", cwd=folder) as command:
        ended = command.wait(60)
    assert ended.code == 0, ended
    found: dict[str, Any] = json.loads(ended.out)
    return found


@pytest.mark.slow
def test_the_cause_of_a_slower_step_is_named(tmp_path: Path) -> None:
    copy(Path(__file__).with_name("slower.py"), tmp_path)
    assert run(*STEPS, "hydra.run.dir=base", cwd=tmp_path).code == 0
    rows = read_events(tmp_path / "base")
    assert [row["step"] for row in rows if row.get("profiled")] == [7, 8, 9], "a warm-up and two traced steps"
    assert len(read(tmp_path / "base" / "explain.json")["seconds"]["forward matmul"]) == 2
    assert not (tmp_path / "base" / "trace").exists()
    for i, (cause, line) in enumerate(CAUSES.items()):
        assert run(*STEPS, cause, f"hydra.run.dir=run{i}", cwd=tmp_path).code == 0
        found = explained(tmp_path, "base", f"run{i}")
        more = {each["name"]: each["difference"] for each in found["lines"]}
        traced = found["difference_s"] - more["unexplained"]  # the measured steps may have run beside other processes
        assert more[line] == pytest.approx(traced, rel=0.1), found
        assert f"more {line}" in found["sentence"]


@pytest.mark.slow
def test_recomputation_is_told_from_backward(tmp_path: Path) -> None:
    size = ("seq_len=256", "model.dim=128", "model.ffn_dim=512", "micro_batch=4")
    for name in ("none", "full"):
        given = (f"activation_checkpoint={name}", f"hydra.run.dir={name}")
        assert run(*STEPS, *size, *given, cwd=tmp_path).code == 0
    seconds = [read(tmp_path / name / "explain.json")["seconds"] for name in ("none", "full")]
    assert not any(line.startswith("recompute") for line in seconds[0])
    ratio = sum(seconds[1]["recompute matmul"]) / sum(seconds[1]["forward matmul"])
    assert 0.3 < ratio < 1.5, "all products of blocks are computed again, and not the output projection"


@pytest.mark.slow
def test_a_run_with_too_few_steps_is_not_traced(tmp_path: Path) -> None:
    ended = run("steps=5", "measure_after=2", "sweep.explain=true", cwd=tmp_path)
    assert ended.code == 0 and "sweep.explain has no effect: steps(5) must be at least 6" in ended.err
    assert not (tmp_path / "out" / "explain.json").exists()
    ended = run("sweep.explain=true", "profiler=trace", cwd=tmp_path)
    assert ended.code == 2 and "choose one of them" in ended.err

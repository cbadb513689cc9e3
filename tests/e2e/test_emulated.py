"""`launch.emulate`: one process plays one rank of a mesh that is larger than this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import TINY, meshrunner, read, run, status

MESH = ("launch.workers=64", "launch.emulate=0")
PROFILED = ("measure_after=1", "profiler=memory", "profiler.start=0", "profiler.steps=3", "steps=6")


@pytest.mark.slow(sampled=True)
def test_memory_equals_the_plan_and_the_table_says_emulated(folder: Path) -> None:
    layouts = "parallelism=fsdp1,fsdp2,fsdp2_tp"
    ended = meshrunner("run", "-m", *TINY, *MESH, *PROFILED, layouts, "hydra.sweep.dir=sweep", cwd=folder)
    assert ended.code == 0, ended
    assert ended.out.count("| rank 0 of 64 |") == 3 and "compute step time" in ended.out, ended.out
    assert "emulated: one device executed only the named rank" in ended.out
    for each in sorted((folder / "sweep").glob("0*")):
        measured, plan = read(each / "trace" / "memory_rank0.json"), read(each / "plan.json")
        assert measured["peak_live_bytes"] == round(plan["memory/peak_active_gib"] * 2**30), each
    found = json.loads(meshrunner("compare", "sweep", "--baseline", "parallelism=fsdp1", "--json", cwd=folder).out)
    assert [row["emulated"] for row in found] == ["rank 0 of 64"] * 3
    assert [row["perf/wps_median"] for row in found] == [None] * 3
    assert [row["loss_why"] for row in found[1:]] == ["an emulated rank has no loss"] * 2


@pytest.mark.slow(sampled=True)
def test_an_emulated_rank_has_no_loss_and_no_tracker(folder: Path) -> None:
    ended = run(
        "launch.nodes=4", "launch.workers=8", "launch.emulate=31", "parallelism=ddp", "tracker=wandb", cwd=folder
    )
    assert ended.code == 0 and "rank 31 is emulated: there is no loss and no gradient" in ended.err, ended
    summary = read(folder / "out" / "summary.json")
    assert summary["world_size"] == 32 and summary["train/final_loss"] is None
    assert summary["perf/compute_step_time_s_median"] > 0 and summary["perf/wps_median"] is None
    assert not (folder / "out" / "wandb").exists() and (folder / "out" / "logs" / "rank31.log").exists()


@pytest.mark.slow
def test_a_rank_outside_the_mesh_is_refused(folder: Path) -> None:
    ended = run("launch.workers=8", "launch.emulate=8", cwd=folder)
    expected = "launch.emulate(8): the last rank of launch.nodes(1) x launch.workers(8) is 7"
    assert ended.code == 2 and expected in ended.err and len(ended.err.splitlines()) < 30, ended
    swept = meshrunner("run", "-m", *TINY, "launch.workers=1", "launch.emulate=0,1", "hydra.sweep.dir=s", cwd=folder)
    assert [status(each)["state"] for each in sorted((folder / "s").glob("0*"))] == ["completed", "skipped"], swept

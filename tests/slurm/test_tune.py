"""Searches and sweeps inside an allocation of two nodes: every run is a job step over both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.command import TINY, meshrunner, read, status
from tests.slurm.cluster import MAIN, ended, slurm, until

TWO = ("launch.nodes=2", "launch.workers=2")
SEARCH = (
    *(*TINY, *TWO, "parallelism=fsdp1,fsdp2", "global_batch=8", "micro_batch=1,2", "hydra.sweep.dir=tuned"),
    *("tune.runs=3", "tune.steps=6", "measure_after=2", "sweep.max_repeat=3", "hydra/launcher=slurm", *MAIN),
)


def runs_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/status.json"))


def completed(folder: Path) -> list[str]:
    return [run.name for run in runs_of(folder) if status(run)["state"] == "completed"]


@pytest.mark.slow(sampled=True)
def test_a_search_is_one_job_that_continues_after_a_requeue(folder: Path) -> None:
    done = meshrunner("tune", *SEARCH, cwd=folder)
    assert done.code == 0 and "submitted job " in done.out, done
    job = done.out.split("submitted job ")[1].split()[0]
    tuned = folder / "tuned"
    until(lambda: completed(tuned), 120)
    # The launcher writes the summary after the status.
    until(lambda: all(read(tuned / name / "summary.json").get("state") for name in completed(tuned)), 20)
    before = {name: (tuned / name / "summary.json").read_bytes() for name in completed(tuned)}
    slurm("scontrol", "requeue", job)
    ended()
    out = (tuned / "logs" / f"slurm-{job}.out").read_text()
    assert "No combination of this space is " in out, out
    assert len(completed(tuned)) == len(runs_of(tuned)) >= 3
    assert {read(run / "summary.json")["world_size"] for run in runs_of(tuned)} == {4}
    assert all((tuned / name / "summary.json").read_bytes() == content for name, content in before.items())
    found = yaml.safe_load((tuned / "experiment" / "best.yaml").read_text())
    assert found["global_batch"] == 8
    again = meshrunner("submit", "tuned", cwd=folder)
    assert again.code == 0 and "submitted job " in again.out, again
    ended()
    assert len(completed(tuned)) == len(runs_of(tuned))


@pytest.mark.slow
def test_a_sweep_in_an_allocation_starts_each_run_over_its_nodes(folder: Path) -> None:
    words = [
        "run",
        "-m",
        *TINY,
        *TWO,
        "parallelism=fsdp1,fsdp2",
    ]
    slurm(
        "salloc",
        "--nodes=2",
        "--partition=main",
        sys.executable,
        "-m",
        "meshrunner",
        *words,
        f"hydra.sweep.dir={folder}/sweep",
    )
    rows = json.loads(meshrunner("compare", "sweep", "--json", cwd=folder).out)
    assert [row["state"] for row in rows] == ["completed"] * 2
    assert {read(run / "summary.json")["world_size"] for run in runs_of(folder / "sweep")} == {4}
    local = meshrunner("run", "-m", *TINY, *TWO, "parallelism=fsdp1,fsdp2", "hydra.sweep.dir=local", cwd=folder)
    assert local.out.count("is skipped: launch.nodes(2): this command starts workers on one machine only") == 2

"""Runs and sweeps on a real SLURM cluster: two nodes of two workers each."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.slurm.client import show_job
from tests.e2e.command import TINY, meshrunner, read, run, status, steps_done
from tests.e2e.wandb_offline import read_offline_run
from tests.slurm.cluster import LOW, MAIN, SLOW, daemons_of_step, ended, in_a_step, root, slurm, submit, until

SCRIPT = Path(__file__).parents[2] / "slurm" / "run.sbatch"


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm) of every step, the last row of each."""
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in read_events(run_dir)]


def job_of(run_dir: Path) -> str:
    return str(read(run_dir / "slurm.json")["job_id"])


def attempts(run_dir: Path) -> list[int]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["attempt"] for line in lines})


def straight(folder: Path, *overrides: str, workers: int) -> list[tuple[int, float, float]]:
    """The curve of the same run, here and undisturbed."""
    done = run(*overrides, f"launch.workers={workers}", cwd=folder, run_dir=f"straight{workers}")
    assert done.code == 0, done
    return curve(folder / f"straight{workers}")


@pytest.mark.slow
def test_a_sweep_on_two_nodes_equals_the_local_one(folder: Path) -> None:
    grid = ("parallelism=fsdp1,fsdp2", "micro_batch=1,2")
    done = submit(*grid, "hydra.sweep.dir=sweep", "hydra.launcher.nodes=2", *MAIN, cwd=folder, flags=("-m",))
    assert "completed" not in {status(run)["state"] for run in (folder / "sweep").iterdir() if run.is_dir()}  # at once
    assert "4 runs, 2 nodes each" in done.out
    assert "checkpoint=none" in done.err  # and what a requeue means then
    ended()
    local = meshrunner("run", "-m", *TINY, *grid, "launch.workers=4", "hydra.sweep.dir=local", cwd=folder)
    assert local.code == 0, local
    names = (folder / "sweep" / "runs.txt").read_text().split()
    assert len(names) == 4
    for name in names:
        there, here = folder / "sweep" / name, folder / "local" / name
        assert status(there)["state"] == "completed"
        assert curve(there) == curve(here)
        assert read(there / "summary.json")["world_size"] == 4
        assert status(there)["owner"]["slurm_job_id"]
    rows = json.loads(meshrunner("compare", "sweep", "--json", cwd=folder).out)
    assert len(rows) == 4
    again = submit(*grid, "hydra.sweep.dir=sweep", "hydra.launcher.nodes=2", *MAIN, cwd=folder, flags=("-m",))
    assert "submitted" not in again.out
    assert again.out.count("is completed") == 4


def plain_sbatch(*options: str, arguments: Sequence[str]) -> str:
    """Submit slurm/run.sbatch as it is shipped; returns the job's number."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return slurm("sbatch", "--parsable", f"--export=ALL,PATH={path}", *options, str(SCRIPT), *arguments)


def test_one_run_by_plain_sbatch(folder: Path) -> None:
    job = plain_sbatch("--nodes=2", arguments=TINY)
    ended()
    out = (folder / f"slurm-{job}.out").read_text()
    assert status(folder / "runs" / f"slurm-{job}")["state"] == "completed", out
    assert read(folder / "runs" / f"slurm-{job}" / "summary.json")["world_size"] == 4


@pytest.mark.slow
def test_a_sweep_by_plain_sbatch(folder: Path) -> None:
    placed = meshrunner("place", "-m", *TINY, "seed=1,2", "hydra.sweep.dir=sweep", cwd=folder)
    assert placed.code == 0, placed
    job = plain_sbatch("--array=0-2", arguments=["sweep"])
    ended()
    runs = sorted((folder / "sweep").glob("0*"))
    assert [status(run_dir)["state"] for run_dir in runs] == ["completed"] * 2
    assert "line 3 of sweep/runs.txt names no run directory" in (folder / f"slurm-{job}_2.out").read_text()


@pytest.mark.slow
def test_each_task_of_an_array_ends_as_it_ends(folder: Path) -> None:
    """One fails, one is cancelled, one exceeds its limit; the others complete."""
    overrides = (
        "model.kind=faulty:Raises",
        "+model.rank=1",
        "+model.step=2,1000000",
        "optimizer.kind=faulty:SlowAdamW",
        "steps=3,5000",
        "seed=1,2",
    )
    limits = ("hydra.launcher.partition=main", "hydra.launcher.time=0:01:00", "hydra.launcher.notice_s=0")
    submit(*overrides, *limits, "hydra.launcher.max_requeues=0", "hydra.sweep.dir=sweep", cwd=folder, flags=("-m",))
    names = (folder / "sweep" / "runs.txt").read_text().split()
    dirs = {tuple(read_overrides(folder / "sweep" / name)): folder / "sweep" / name for name in names}
    raising = [path for key, path in dirs.items() if "+model.step=2" in key]
    long = [path for key, path in dirs.items() if "+model.step=2" not in key and "steps=5000" in key]
    short = [path for key, path in dirs.items() if "+model.step=2" not in key and "steps=3" in key]
    for path in long:
        in_a_step(path, 1)
    slurm("scancel", job_of(long[0]))
    ended()
    for path in raising:
        assert status(path)["state"] == "failed"
        assert "the user's own mistake" in status(path)["reason"]
    for path in short:
        assert status(path)["state"] == "completed"
    assert status(long[0])["state"] == "interrupted"
    assert "scancel" in status(long[0])["reason"]
    assert status(long[1])["state"] == "preempted"
    assert "time limit" in status(long[1])["reason"]
    shown = meshrunner("status", "sweep", cwd=folder).out
    assert re.search(rf"{long[1].name}.*TIMEOUT", shown), shown
    assert re.search(rf"{long[0].name}.*CANCELLED", shown), shown


def read_overrides(run_dir: Path) -> list[str]:
    found: list[str] = yaml.safe_load((run_dir / "overrides.yaml").read_text())["task"]
    return found


@pytest.mark.slow_cases("USR1*")
@pytest.mark.parametrize("sent", ["USR1 to the batch shell", pytest.param("SIGTERM to all", marks=pytest.mark.slow)])
def test_preempted_by_a_job_of_higher_priority(sent: str, folder: Path) -> None:
    """Saved, requeued, continued: the same curve as undisturbed, and one W&B run of all steps."""
    overrides = (*SLOW, "steps=60", "tracker=wandb")
    configure(preempt_send_user_signal=sent.startswith("USR1"))
    try:
        submit(*overrides, *LOW, "hydra.launcher.nodes=2", "hydra.run.dir=out", cwd=folder)
        in_a_step(folder / "out")
        urgent = slurm("sbatch", "--parsable", "--partition=main", "--exclusive", "--nodes=2", "--wrap=sleep 3")
        until(lambda: status(folder / "out")["state"] == "preempted", 60)
        assert "preempted" in status(folder / "out")["reason"]
        assert steps_done(folder / "out") < 60
        until(lambda: status(folder / "out")["state"] == "completed", 120)
        ended()
    finally:
        configure(preempt_send_user_signal=True)
    assert urgent
    assert attempts(folder / "out") == [1, 2]
    assert curve(folder / "out") == straight(folder, *overrides, "tracker=none", workers=4)
    (segment,) = (folder / "out" / "wandb").glob("offline-run-*/*.wandb")
    recorded = read_offline_run(segment)
    assert [row["_step"] for row in recorded.history] == list(range(1, 61))


def configure(*, preempt_send_user_signal: bool) -> None:
    """What preemption sends first: a job's own --signal, or SIGTERM."""
    path = root() / "etc" / "slurm.conf"
    text = path.read_text()
    line = "SlurmctldParameters=preempt_send_user_signal"
    text = re.sub(rf"^#?{line}$", line if preempt_send_user_signal else f"#{line}", text, flags=re.MULTILINE)
    path.write_text(text)
    slurm("scontrol", "reconfigure")


@pytest.mark.slow
def test_usr1_by_hand_is_heard_by_the_batch_shell(folder: Path) -> None:
    overrides = (*SLOW, "steps=60")
    submit(*overrides, *MAIN, "hydra.run.dir=out", cwd=folder)
    in_a_step(folder / "out")
    slurm("scancel", "--batch", "--signal=USR1", job_of(folder / "out"))
    until(lambda: status(folder / "out")["state"] == "completed", 120)
    ended()
    assert attempts(folder / "out") == [1, 2]
    assert curve(folder / "out") == straight(folder, *overrides, workers=2)


@pytest.mark.slow
def test_a_node_that_dies(folder: Path) -> None:
    """The daemon that holds one node's tasks is killed: the other node's workers end soon, and the job completes."""
    overrides = (*SLOW, "checkpoint.every=5", "steps=60")
    submit(*overrides, *MAIN, "hydra.launcher.nodes=2", "hydra.run.dir=out", cwd=folder)
    in_a_step(folder / "out", 7)
    daemons = daemons_of_step(job_of(folder / "out"))
    assert len(daemons) == 2
    daemons[1].send_signal(signal.SIGKILL)
    until(lambda: status(folder / "out")["state"] != "running", 240)
    until(lambda: status(folder / "out")["state"] == "completed", 240)
    ended()
    assert attempts(folder / "out") == [1, 2]
    assert curve(folder / "out") == straight(folder, *overrides, workers=4)


@pytest.mark.slow_cases("all GPUs of a node")
@pytest.mark.parametrize(
    ("workers", "cpus", "exclusive"),
    [(8, 16, True), (2, 4, False)],
    ids=["all GPUs of a node", "two of them"],
)
def test_the_cpus_of_a_job_with_gpus(workers: int, cpus: int, exclusive: bool, folder: Path) -> None:
    """A node of the cluster has 16 CPUs and 8 GPUs that torch cannot use: the run fails, the job shows what it was given."""
    asked = ("hardware=h100_80gb", f"launch.workers={workers}", "hydra.launcher.cpus_per_gpu=2")
    submit(*asked, *MAIN, "hydra.launcher.max_requeues=0", "hydra.run.dir=out", cwd=folder)
    ended()
    job = show_job(job_of(folder / "out"))
    assert (job["NumCPUs"], job["OverSubscribe"] == "NO") == (str(cpus), exclusive), job
    said = next((folder / "out" / "logs").glob("slurm-*.out")).read_text()
    assert "no GPU that torch can use" in said, said


def test_what_slurm_refuses_is_said_and_nothing_is_lost(folder: Path) -> None:
    wrong = ("hydra.launcher.partition=nonesuch",)
    done = submit("seed=1,2", *wrong, "hydra.sweep.dir=sweep", cwd=folder, code=2, flags=("-m",))
    assert "invalid partition specified: nonesuch" in done.err
    assert [status(path)["state"] for path in sorted((folder / "sweep").glob("0*"))] == ["pending", "pending"]
    many = submit("hydra.launcher.nodes=3", "hydra.run.dir=out", cwd=folder, code=2)
    assert "Node count specification invalid" in many.err or "node configuration is not available" in many.err
    assert status(folder / "out")["state"] == "pending"
    again = meshrunner("submit", "sweep", "hydra.launcher.partition=main", cwd=folder)
    assert again.code == 0, again
    ended()
    assert [status(path)["state"] for path in sorted((folder / "sweep").glob("0*"))] == ["completed", "completed"]


@pytest.mark.slow
def test_cancel_and_submit_again(folder: Path) -> None:
    """One runs, the rest wait: cancelled, the one is interrupted, the others are pending; again, and all complete."""
    submit(
        *SLOW, "steps=100", "seed=1,2", *MAIN, "hydra.launcher.max_parallel=1", "hydra.sweep.dir=sweep",
        cwd=folder, flags=("-m",),
    )  # fmt: skip
    runs = sorted((folder / "sweep").glob("0*"))
    in_a_step(runs[0])
    shown = meshrunner("status", "sweep", cwd=folder).out
    assert re.search(rf"{runs[0].name}.*running.*RUNNING on node", shown), shown
    assert re.search(rf"{runs[1].name}.*pending.*PENDING \(JobArrayTaskLimit\)", shown), shown
    assert meshrunner("cancel", "sweep", cwd=folder).code == 0
    until(lambda: status(runs[0])["state"] == "interrupted", 30)
    assert "scancel" in status(runs[0])["reason"]
    ended()
    assert [status(path)["state"] for path in runs[1:]] == ["pending"]
    again = meshrunner("submit", "sweep", "hydra.launcher.wait=true", cwd=folder)
    assert again.code == 0, again
    assert [status(path)["state"] for path in runs] == ["completed"] * 2

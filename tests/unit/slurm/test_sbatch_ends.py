"""What the batch shell executes, and what it makes of the end of srun: its exit status, and whether the job starts again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from meshrunner.runner.rundir.files import write_json

SCRIPT = Path(__file__).parents[3] / "slurm" / "run.sbatch"
JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_ARRAY_JOB_ID": "10",  # in the environment of a single run, too, when a task of an array submits it
    "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_JOB_NUM_NODES": "1",
}
RUNNING = {"state": "running", "owner": {"slurm_job_id": "12", "slurm_restart": "0"}}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of one run, and SLURM's commands, which write down how they were called."""
    run_dir = tmp_path / "sweep" / "000"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    (run_dir.parent / "runs.txt").write_text("000\n")
    write_json(run_dir / "status.json", {"state": "completed"})
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "meshrunner"):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/bash\necho {name} "$@" >>"{tmp_path}/called"\n[ {name} != srun ] || eval "$SRUN"\n')
        path.chmod(0o755)
    return run_dir.parent


def start(sweep: Path, argument: str, srun: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = os.environ | JOB | {"SRUN": srun} | variables
    environment["PATH"] = f"{sweep.parent / 'bin'}:{environment['PATH']}"
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.Popen([bash, str(SCRIPT), argument], env=environment, cwd=sweep.parent)


def called(sweep: Path) -> str:
    return (sweep.parent / "called").read_text()


@pytest.mark.parametrize(("argument", "job"), [("sweep/000", "12"), ("sweep", "10_0")], ids=["run", "sweep"])
@pytest.mark.parametrize(
    ("code", "status", "restarts", "ends", "again"),
    [
        (0, {"state": "completed"}, "0", 0, False),
        (1, {"state": "failed"}, "0", 1, False),
        (75, {"state": "preempted"}, "0", 75, True),
        (75, {"state": "preempted"}, "10", 75, False),
        (137, RUNNING, "0", 75, True),
        (2, RUNNING, "1", 2, False),  # an earlier start was killed; this one found something wrong
        (1, RUNNING | {"owner": {"slurm_job_id": "11", "slurm_restart": "0"}}, "0", 1, False),  # another job is at it
    ],
)
def test_which_jobs_are_started_again(
    sweep: Path, argument: str, job: str, code: int, status: dict[str, object], restarts: str, ends: int, again: bool
) -> None:
    write_json(sweep / "000" / "status.json", status)
    assert start(sweep, argument, f"exit {code}", SLURM_RESTART_COUNT=restarts).wait(20) == ends
    assert f"meshrunner resume {sweep / '000'}\n" in called(sweep)
    assert ("scontrol requeue" in called(sweep)) is again
    assert (f"scontrol requeue {job}\n" in called(sweep)) is again


@pytest.mark.parametrize("argument", ["sweep/000", "sweep"])
def test_a_signal_marks_the_run_and_does_not_hide_the_exit_status(sweep: Path, argument: str) -> None:
    process = start(sweep, argument, f'touch "{sweep}/begun"; sleep 1; exit 75')
    deadline = time.monotonic() + 20
    while not (sweep / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 75
    assert (sweep / "000" / "preempt").read_text() == "12.0\n"


def test_a_run_is_no_task_of_the_array_that_has_submitted_it(sweep: Path) -> None:
    """What the launcher asks SLURM about its job, it would ask about that task."""
    say = 'echo "task ${SLURM_ARRAY_JOB_ID-none} ${SLURM_ARRAY_TASK_ID-none}"'
    for argument in ("sweep", "sweep/000"):
        assert start(sweep, argument, f'{say} >>"{sweep.parent}/called"').wait(20) == 0
    assert re.findall("task .*", called(sweep)) == ["task 10 0", "task none none"]


@pytest.mark.parametrize(("argument", "task"), [("sweep", "1"), ("", "0"), ("nonesuch", "0"), ("seed=1", "0")])
def test_a_task_without_a_run_executes_nothing(
    sweep: Path, argument: str, task: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """`meshrunner resume SWEEP` would execute all of it."""
    assert start(sweep, argument, "exit 0", SLURM_ARRAY_TASK_ID=task).wait(20) == 2
    assert not (sweep.parent / "called").exists()
    assert f"line {int(task) + 1} of {argument}/runs.txt names no run" in capfd.readouterr().err


def test_a_sweep_is_executed_as_an_array_only(sweep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(sweep, "sweep", "exit 0", SLURM_ARRAY_TASK_ID="").wait(20) == 2
    assert not (sweep.parent / "called").exists()
    assert "sweep is a sweep; sbatch --array=0-0 " in capfd.readouterr().err


def test_overrides_are_placed_once_for_a_job_and_the_run_is_continued(sweep: Path) -> None:
    run_dir = sweep.parent / "runs" / "slurm-12"
    place = f"meshrunner place seed=1 hydra.run.dir={run_dir} launch.nodes=1\n"
    assert start(sweep, "seed=1", "exit 0", SLURM_ARRAY_TASK_ID="").wait(20) == 0
    assert called(sweep).startswith(place)
    assert f"meshrunner resume {run_dir}\n" in called(sweep)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    assert start(sweep, "seed=1", "exit 75", SLURM_ARRAY_TASK_ID="").wait(20) == 75
    assert called(sweep).count(place) == 1
    assert called(sweep).endswith("scontrol requeue 12\n")

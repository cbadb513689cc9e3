"""What the batch shell makes of the end of srun: its exit status, and whether the job is started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from meshrunner.runner.rundir.files import write_json

SHIPPED = Path(__file__).parents[2] / "slurm"
JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_ARRAY_JOB_ID": "12",
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
    for name in ("srun", "scontrol"):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/bash\necho {name} "$@" >>"{tmp_path}/called"\n[ {name} = scontrol ] || eval "$SRUN"\n')
        path.chmod(0o755)
    return run_dir.parent


def start(sweep: Path, script: str, srun: str, **variables: str) -> subprocess.Popen[bytes]:
    argument = sweep if script == "sweep.sbatch" else sweep / "000"
    environment = os.environ | JOB | {"SRUN": srun} | variables
    environment["PATH"] = f"{sweep.parent / 'bin'}:{environment['PATH']}"
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.Popen([bash, str(SHIPPED / script), str(argument)], env=environment, cwd=sweep.parent)


def called(sweep: Path) -> str:
    return (sweep.parent / "called").read_text()


@pytest.mark.parametrize("script", ["run.sbatch", "sweep.sbatch"])
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
    sweep: Path, script: str, code: int, status: dict[str, object], restarts: str, ends: int, again: bool
) -> None:
    write_json(sweep / "000" / "status.json", status)
    assert start(sweep, script, f"exit {code}", SLURM_RESTART_COUNT=restarts).wait(20) == ends
    assert ("scontrol requeue" in called(sweep)) is again


@pytest.mark.parametrize("script", ["run.sbatch", "sweep.sbatch"])
def test_a_signal_marks_the_run_and_does_not_hide_the_exit_status(sweep: Path, script: str) -> None:
    process = start(sweep, script, f'touch "{sweep}/begun"; sleep 1; exit 75')
    deadline = time.monotonic() + 20
    while not (sweep / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 75
    assert (sweep / "000" / "preempt").read_text() == "12.0\n"


def test_a_task_without_a_run_does_not_execute_the_sweep(sweep: Path) -> None:
    """`meshrunner resume SWEEP` would execute all of it."""
    assert start(sweep, "sweep.sbatch", "exit 0", SLURM_ARRAY_TASK_ID="1").wait(20) == 2
    assert not (sweep.parent / "called").exists()

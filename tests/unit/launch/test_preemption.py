"""Who requests that a run stops, and what the reason is."""

from __future__ import annotations

import os
import re
import signal
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from meshrunner.recipes.errors import ConfigError, Interrupted
from meshrunner.runner.launch import preemption
from meshrunner.runner.launch.preemption import Preemption
from meshrunner.runner.rundir.files import STOP_REQUEST
from meshrunner.runner.slurm import client
from meshrunner.runner.slurm.client import SlurmJob, jobs


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Inside a job of which `scontrol show job` says what the test puts in."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    said = {"JobState": "RUNNING", "EndTime": "Unknown", "TimeLimit": "00:10:00", "Restarts": "0", "Reason": "None"}
    monkeypatch.setattr(preemption, "show_job", lambda job_id: said)
    monkeypatch.setattr(preemption, "CHECK_EVERY_S", 0.0)
    return said


def test_outside_a_job_nobody_requests_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / STOP_REQUEST).touch()
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(tmp_path) as request:
        assert signal.getsignal(signal.SIGTERM) is before
        request.poll()
        assert not request.requested
        assert request.shared is None


@pytest.mark.parametrize("how", ["mark", "SIGTERM", "SIGUSR1", "orphan"])
def test_each_way_of_requesting_is_heard(
    how: str, tmp_path: Path, in_job: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Preemption(tmp_path) as request:
        request.poll()
        assert not request.requested
        if how == "mark":
            (tmp_path / STOP_REQUEST).write_text("11.0\n")
            request.poll()
            assert not request.requested  # of an earlier job
            (tmp_path / STOP_REQUEST).write_text("12.0\n")
        elif how == "orphan":
            monkeypatch.setattr(os, "getppid", lambda: 1)
        else:
            os.kill(os.getpid(), signal.Signals[how])
        request.poll()
        assert request.requested
        assert request.shared[0] == 1
        assert request.reason


def test_an_interrupt_is_a_request_where_checkpoints_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with Preemption(tmp_path) as request:
        assert not request.interrupt() and not request.interrupted
    with Preemption(tmp_path, saves=True) as request:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        request.poll()
        assert not request.requested, "outside a job, a shell that ends does not end what it started"
        assert request.interrupt() and request.interrupted and request.requested
        for _ in range(2):
            request.poll()
    assert capsys.readouterr().err == "meshrunner: saving a checkpoint; press Ctrl-C again to stop at once\n"


NOW = datetime.now()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "SLURM requested a stop"),
        ({"PreemptTime": "2026-01-01T00:00:00"}, "higher priority"),
        ({"EndTime": (NOW + timedelta(seconds=90)).isoformat(timespec="seconds")}, r"time limit \(00:10:00\) is near"),
        ({"EndTime": (NOW + timedelta(hours=9)).isoformat(timespec="seconds")}, "SLURM requested a stop"),
        ({"JobState": "COMPLETING", "Restarts": "1"}, "requeued by SLURM"),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, r"time limit \(00:10:00\) is reached"),
    ],
)
def test_the_reason_is_slurms(said: dict[str, str], reason: str, tmp_path: Path, in_job: dict[str, str]) -> None:
    in_job |= said
    (tmp_path / STOP_REQUEST).write_text("12.0\n")
    with Preemption(tmp_path) as request:
        request.poll()
        assert request.requested
        assert re.search(reason, request.reason)


def test_scancel_is_an_interrupt(tmp_path: Path, in_job: dict[str, str]) -> None:
    in_job |= {"JobState": "COMPLETING"}
    (tmp_path / STOP_REQUEST).write_text("12.0\n")
    with Preemption(tmp_path) as request, pytest.raises(Interrupted, match="scancel"):
        request.poll()


def test_the_question_to_slurm_outlives_its_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sends SIGTERM to all processes of a job, twice within some hundredths of a second: scontrol gets the second."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nkill -TERM $$\necho JobState=COMPLETING Reason=TimeLimit TimeLimit=00:10:00\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with Preemption(tmp_path) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        request.poll()
        assert request.reason == "the job's time limit (00:10:00) is reached"
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []).isdisjoint({signal.SIGTERM, signal.SIGUSR1})


QUEUE = {
    "12": "12|0|RUNNING|None|node1\n12|1|PENDING|JobArrayTaskLimit|\n12|2|TIMEOUT|TimeLimit|node2\n",
    "13": "13|N/A|COMPLETED|None|node[1-2]\n",
}


def test_what_slurm_says_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*command: str, timeout: float = 0) -> str:
        if command[0] == "squeue":
            parent = command[4].removeprefix("--jobs=")
            if parent not in QUEUE:
                raise ConfigError("slurm_load_jobs error: Invalid job id specified")
            return QUEUE[parent]
        assert command[0] == "sacct"
        assert "--jobs=12,14" in command
        return "14|CANCELLED by 1000|node1\n12_9|FAILED|None assigned\n"

    monkeypatch.setattr(client, "slurm", answer)
    found = jobs(["12_0", "12_1", "12_2", "12_9", "13", "14", "12_7"])
    assert found == {
        "12_0": SlurmJob("RUNNING", "", "node1"),
        "12_1": SlurmJob("PENDING", "JobArrayTaskLimit", ""),
        "12_2": SlurmJob("TIMEOUT", "TimeLimit", "node2"),
        "12_9": SlurmJob("FAILED", "", ""),
        "13": SlurmJob("COMPLETED", "", "node[1-2]"),
        "14": SlurmJob("CANCELLED", "by 1000", "node1"),
    }
    assert str(found["12_1"]) == "PENDING (JobArrayTaskLimit)"

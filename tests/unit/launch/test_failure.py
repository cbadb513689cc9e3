"""Which rank failed first, and why, from what ranks leave behind: exit codes, error files, logs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshrunner.runner.launch import outcome as launch_outcome
from meshrunner.runner.launch.outcome import first_failure, oom_kills
from meshrunner.runner.rundir.files import rank_error, rank_log, write_json

WATCHDOG = """\
../aten/src/ATen/native/cuda/Indexing.cu:1290: block: [5,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.
[rank1]:[E1122 10:00:00.123456789 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog \
thread terminated with exception: CUDA error: {said}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:42 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f6e21d7eeb0 in libc10.so)

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: {said}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:42 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f6e21d7eeb0 in libc10.so)

Fatal Python error: Aborted

Thread 0x00007f3d6bb3c090 (most recent call first):
  <no Python frame>
"""
ASSERTION = "CUDA error: device-side assert triggered"
CLOSED = (
    "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nLast error:\nConnection closed by remote peer node1<5159>"
)
TIMEOUT = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=199) ran for 882725 milliseconds"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def aborted(folder: Path, rank: int, said: str) -> dict[int, int]:
    """A rank that NCCL's watchdog has aborted; its exit code."""
    with rank_log(folder, rank).open("a") as log:
        log.write(WATCHDOG.format(said=said))
    return {rank: -signal.SIGABRT}


def raised(folder: Path, rank: int, message: str) -> dict[int, int]:
    write_json(rank_error(folder, rank), {"time": 1.0, "rank": rank, "oom": False, "message": message, "plain": False})
    return {rank: 1}


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (ASSERTION, "failed"),
        ("CUDA error: an illegal memory access was encountered", "failed"),
        ("CUDA error: out of memory", "oom"),
    ],
)
def test_what_the_watchdog_saw_is_the_reason(said: str, state: str, folder: Path) -> None:
    codes = aborted(folder, 1, said) | raised(folder, 0, "DistBackendError: " + CLOSED)
    outcome = first_failure(folder, codes, killed_by_kernel=False)
    assert outcome.reason == f"rank 1: Process group watchdog thread terminated with exception: {said}"
    assert (outcome.state, outcome.rank, outcome.exit_code, outcome.collateral) == (state, 1, -6, False)


@pytest.mark.parametrize("said", [CLOSED, TIMEOUT])
def test_a_victim_is_not_the_cause(said: str, folder: Path) -> None:
    outcome = first_failure(folder, aborted(folder, 1, said), killed_by_kernel=False)
    assert outcome.collateral
    codes = aborted(folder, 1, said) | raised(folder, 0, "ValueError: the user's own mistake")
    assert first_failure(folder, codes, killed_by_kernel=False).rank == 0


def test_an_abort_that_says_nothing_is_not_explained_by_an_earlier_attempt(folder: Path) -> None:
    codes = aborted(folder, 1, ASSERTION)
    with rank_log(folder, 1).open("a") as log:  # the log continues
        log.write("free(): invalid pointer\nFatal Python error: Aborted\n")
    outcome = first_failure(folder, codes, killed_by_kernel=False)
    assert (outcome.state, outcome.reason) == ("failed", "rank 1 was killed by signal SIGABRT")


def test_without_a_log_the_signal_is_the_reason(folder: Path) -> None:
    outcome = first_failure(folder, {0: -signal.SIGABRT}, killed_by_kernel=True)
    assert (outcome.state, outcome.reason) == ("failed", "rank 0 was killed by signal SIGABRT")


@pytest.mark.parametrize(
    ("membership", "counted"),
    [
        ("0::/slurm/job_7/step_0\n", 3),
        ("9:name=systemd:/x\n4:memory:/slurm/job_8\n0::/\n", 5),  # version 1
        ("0::/a/container/sees/its/own/as/the/root\n", 2),
        ("9:name=systemd:/x\n", 70),  # nothing accounts for memory
        ("", 70),
    ],
)
def test_whose_kills_count(membership: str, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "proc/cgroup": membership,
        "proc/vmstat": "nr_free_pages 9\noom_kill 70\n",
        "cgroup/memory.events": "low 0\noom 1\noom_kill 2\n",
        "cgroup/slurm/job_7/step_0/memory.events": "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n",
        "cgroup/memory/slurm/job_8/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(launch_outcome, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(launch_outcome, "MEMBERSHIP", tmp_path / "proc" / "cgroup")
    monkeypatch.setattr(launch_outcome, "MACHINE", tmp_path / "proc" / "vmstat")
    assert oom_kills() == counted

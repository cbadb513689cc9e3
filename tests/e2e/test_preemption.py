"""What a run and a sweep do when their job is requested to stop. No SLURM is needed: they only see its variables."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import TINY, Command, meshrunner, read, status, steps_done

SLOW = ("optimizer.kind=faulty:SlowAdamW", "checkpoint=dcp", "checkpoint.every=1000")


@pytest.fixture(autouse=True)
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHRUNNER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("SLURM_JOB_ID", "2000000001")
        yield


def losses(run_dir: Path) -> list[float]:
    return [row["train/loss"] for row in read_events(run_dir)]


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "sweep").glob("0*"))


def states(folder: Path) -> list[str]:
    return [str(status(run)["state"]) for run in runs(folder)]


@pytest.mark.slow_cases("SIGTERM*")
@pytest.mark.parametrize(
    "how", ["SIGTERM to all", *(pytest.param(how, marks=pytest.mark.slow) for how in ("SIGUSR1", "mark"))]
)
def test_a_run_saves_itself_and_continues(how: str, folder: Path) -> None:
    arguments = ("run", *TINY, *SLOW, "steps=30", "hydra.run.dir=out")
    with Command(*arguments, cwd=folder) as command:
        command.until(lambda: steps_done(folder / "out") >= 3)
        if how == "mark":
            (folder / "out" / "preempt").write_text("2000000001.0\n")
        elif how == "SIGUSR1":
            command.process.send_signal(signal.SIGUSR1)
        else:
            os.killpg(command.pid, signal.SIGTERM)  # workers and forkserver, too
        ended = command.wait(30).check_manners()
        command.check_nobody_left()
    assert ended.code == 75, ended
    assert status(folder / "out")["state"] == "preempted"
    assert "SLURM requested a stop" in status(folder / "out")["reason"]
    assert read(folder / "out" / "summary.json")["state"] == "preempted"
    left = len(losses(folder / "out"))
    assert 3 <= left < 30
    # The mark that lies there is of the start before.
    again = meshrunner("resume", "out", cwd=folder, SLURM_RESTART_COUNT="1")
    assert again.code == 0, again
    assert f"continues after step {left}" in again.out
    straight = meshrunner("run", *TINY, "steps=30", "hydra.run.dir=straight", cwd=folder)
    assert straight.code == 0
    assert losses(folder / "out") == losses(folder / "straight")


@pytest.mark.slow_cases("one by one")
@pytest.mark.parametrize(
    "devices", [pytest.param(1, id="one by one"), pytest.param(4, id="side by side", marks=pytest.mark.slow)]
)
def test_a_sweep_stops_and_continues(devices: int, folder: Path) -> None:
    arguments = (
        "run",
        "-m",
        *TINY,
        *SLOW,
        "steps=30",
        "seed=1,2,3",
        f"sweep.devices={devices}",
        "hydra.sweep.dir=sweep",
    )
    going = 1 if devices == 1 else 2
    with Command(*arguments, cwd=folder) as command:
        command.until(lambda: len(runs(folder)) == 3 and min(map(steps_done, runs(folder)[:going])) >= 2)
        command.process.send_signal(signal.SIGTERM)
        ended = command.wait(60).check_manners()
        command.check_nobody_left()
    assert ended.code == 75, ended
    assert states(folder) == ["preempted"] * going + ["pending"] * (3 - going)
    again = meshrunner("resume", "sweep", cwd=folder, SLURM_RESTART_COUNT="1")
    assert again.code == 0, again
    assert states(folder) == ["completed"] * 3
    assert [status(run)["attempt"] for run in runs(folder)] == [2] * going + [1] * (3 - going)


@pytest.mark.slow
def test_requested_to_stop_before_it_begins_a_run_begins_nothing(folder: Path) -> None:
    """While torch is imported; a signal must not be lost then, nor end the command by itself."""
    with Command("run", *TINY, *SLOW, "steps=1000", "hydra.run.dir=out", cwd=folder) as command:
        command.until(lambda: (folder / "out" / "config.yaml").exists())
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(30).code == 75
        command.check_nobody_left()
    assert status(folder / "out")["state"] == "preempted"
    assert steps_done(folder / "out") <= 2


def test_several_nodes_want_slurm(folder: Path) -> None:
    ended = meshrunner("run", *TINY, "launch.nodes=2", "hydra.run.dir=out", cwd=folder)
    assert ended.code == 2
    assert "launch.nodes(2)" in ended.err and "meshrunner submit" in ended.err
    assert not (folder / "out").exists()

"""Sweeps that are stopped, resumed, repeated, and run side by side."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.run import load_config
from tests.e2e.command import TINY, Command, Ended, meshrunner, read, status, steps_done


def sweep(*overrides: str, cwd: Path) -> Ended:
    return meshrunner("run", "-m", *TINY, "hydra.sweep.dir=sweep", *overrides, cwd=cwd)


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "sweep").glob("0*"))


def states(folder: Path) -> list[str]:
    return [status(run)["state"] for run in runs(folder)]


@pytest.mark.slow
def test_repeats_are_rounds_and_equal(folder: Path) -> None:
    ended = sweep("parallelism=ddp,fsdp2", "sweep.repeat=2", "sweep.seeds=2", cwd=folder)
    assert ended.code == 0, ended
    assert states(folder) == ["completed"] * 8
    begun = sorted(runs(folder), key=lambda run: status(run)["started"])
    for i, end in enumerate(("seed-0_repeat-1", "seed-1_repeat-1", "seed-0_repeat-2", "seed-1_repeat-2")):
        one_round = {run.name for run in begun[2 * i : 2 * i + 2]}
        assert one_round == {f"000_parallelism-ddp_{end}", f"001_parallelism-fsdp2_{end}"}
    assert [read(run / "summary.json")["cold"] for run in begun] == [True, *[False] * 7]
    losses = {run.name: [row["train/loss"] for row in read_events(run)] for run in runs(folder)}
    once, again = (losses[f"000_parallelism-ddp_seed-1_repeat-{n}"] for n in (1, 2))
    assert once == again != losses["000_parallelism-ddp_seed-0_repeat-1"]
    assert (folder / "sweep" / "report.html").exists() and "report page: sweep/report.html" in ended.out


@pytest.mark.slow
def test_repeat_auto_repeats_what_is_not_decided(folder: Path) -> None:
    """Three combinations that differ in nothing that matters, with two or three of them in the fourth and last round."""
    twins = "+launch.env.TWIN=a,b,c"
    placed = meshrunner(
        "place", "-m", *TINY, "hydra.sweep.dir=sweep", twins, "sweep.repeat=auto", "sweep.max_repeat=4", cwd=folder
    )
    assert placed.code == 0, placed
    assert len(runs(folder)) == 9
    ended = meshrunner("resume", "sweep", cwd=folder)
    assert ended.code == 0, ended
    assert states(folder) == ["completed"] * len(runs(folder))
    fourth = [run.name for run in runs(folder) if run.name.endswith("_repeat-4")]
    assert len(fourth) >= 2 and f"round 4: repeating the {len(fourth)} of 3 combinations" in ended.out
    again = meshrunner("resume", "sweep", cwd=folder)
    assert "round" not in again.out and len(runs(folder)) == 9 + len(fourth)


@pytest.mark.slow
def test_the_same_command_executes_unfinished_runs(folder: Path) -> None:
    """Here the second of three is killed with the sweep, as by a crash of the node."""
    arguments = [
        "run",
        "-m",
        *TINY,
        "hydra.sweep.dir=sweep",
        "optimizer.kind=faulty:SlowAdamW",
        "steps=6",
        "seed=1,2,3",
    ]
    with Command(*arguments, cwd=folder) as command:
        command.until(lambda: len(runs(folder)) == 3 and steps_done(runs(folder)[1]) >= 2)
        command.process.kill()
        command.wait()
        command.check_nobody_left()
    assert states(folder) == ["completed", "running", "pending"]
    first = (runs(folder)[0] / "events.jsonl").read_text()
    ended = meshrunner(*arguments, cwd=folder)
    assert ended.code == 0, ended
    assert states(folder) == ["completed"] * 3
    assert [status(run)["attempt"] for run in runs(folder)] == [1, 2, 1]
    assert (runs(folder)[0] / "events.jsonl").read_text() == first
    resumed = meshrunner("resume", "sweep", cwd=folder)
    assert resumed.code == 0 and resumed.out.count("is completed") == 3, resumed


@pytest.mark.slow
def test_a_directory_of_another_run_is_not_used(folder: Path) -> None:
    assert sweep("seed=1,2", cwd=folder).code == 0
    ended = sweep("seed=1,2", "optimizer.lr=1e-4", cwd=folder)
    assert ended.code == 2 and "optimizer.lr: 0.001 on disk, 0.0001 now" in ended.err, ended
    ended = sweep("seed=1,2", "sweep.retry=1", cwd=folder)
    assert ended.code == 0 and [status(run)["attempt"] for run in runs(folder)] == [1, 1]


@pytest.mark.slow
def test_results_that_are_wanted_again(folder: Path) -> None:
    limits = ("launch.host_memory_gib=0.02,null", "model.ffn_dim=200000")
    assert sweep(*limits, cwd=folder).code == 0
    assert states(folder) == ["oom", "completed"]
    assert sweep(*limits, cwd=folder).code == 0
    assert [status(run)["attempt"] for run in runs(folder)] == [1, 1]
    assert sweep(*limits, "sweep.rerun=[oom]", cwd=folder).code == 0
    assert [status(run)["attempt"] for run in runs(folder)] == [2, 1]


@pytest.mark.slow
def test_a_crashed_run_is_tried_again(folder: Path) -> None:
    arguments = ["run", "-m", *TINY, "hydra.sweep.dir=sweep", "model.kind=faulty:Raises", "+model.step=2", "seed=1,2"]
    with Command(*arguments, "sweep.retry=1", cwd=folder) as command:
        assert command.wait(60).code == 1
    assert [status(run)["attempt"] for run in runs(folder)] == [2, 2]


@pytest.mark.slow
def test_what_is_excluded_is_a_skipped_row(folder: Path) -> None:
    rules = "sweep.exclude=['parallelism=ddp seed=2,3','optimizer.lr=0.5']"
    assert sweep("parallelism=ddp,fsdp2", "seed=1,2", rules, cwd=folder).code == 0
    assert states(folder) == ["completed", "skipped", "completed", "completed"]
    assert status(runs(folder)[1])["reason"] == "sweep.exclude: parallelism=ddp seed=2,3"
    ended = sweep("seed=1,2", "sweep.exclude=['paralelism=ddp']", "hydra.sweep.dir=other", cwd=folder)
    assert ended.code == 2 and "Did you mean 'parallelism'" in ended.err, ended


def test_an_override_may_refer_to_a_key_that_is_swept_over(folder: Path) -> None:
    sweep("seed=1,2", "micro_batch=${seed}", "sweep.exclude=[seed=1,2]", cwd=folder)
    assert [load_config(run)["micro_batch"] for run in runs(folder)] == [1, 2]


@pytest.mark.slow
def test_runs_share_the_devices_of_a_node(folder: Path) -> None:
    """Four pretended devices and runs of two: two at a time, each with its own devices."""
    slow = ("optimizer.kind=faulty:SlowAdamW", "steps=5")
    ended = sweep("seed=1,2,3", "sweep.devices=4", *slow, cwd=folder)
    assert ended.code == 0, ended
    assert states(folder) == ["completed"] * 3
    spans = [(status(run)["started"], status(run)["ended"]) for run in runs(folder)]
    at_once = [sum(a < end and start < b for start, end in spans) for a, b in spans]
    assert max(at_once) >= 2
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    assert most == 2
    started = re.findall(r"started on (.*)", ended.out)
    assert len(started) == 3 and set(started) == {"0, 1", "2, 3"}
    visible = {read(run / "environment.json")["environment"].get("CUDA_VISIBLE_DEVICES") for run in runs(folder)}
    assert visible == {os.environ.get("CUDA_VISIBLE_DEVICES")}, "runs on CPUs must not see a GPU that was hidden"


@pytest.mark.slow
def test_an_interrupt_reaches_runs_that_share_a_node(folder: Path) -> None:
    arguments = ["run", "-m", *TINY, "hydra.sweep.dir=sweep", "optimizer.kind=faulty:SlowAdamW", "steps=1000"]
    with Command(*arguments, "seed=1,2,3", "sweep.devices=4", cwd=folder) as command:
        command.until(lambda: len(runs(folder)) == 3 and min(map(steps_done, runs(folder)[:2])) >= 2)
        command.interrupt()
        ended = command.wait(25)
        command.check_nobody_left()
    assert ended.code == 130, ended
    assert states(folder) == ["interrupted", "interrupted", "pending"]


WAITS = ("model.kind=faulty:WaitsForFile", "+model.step=3", "+model.job=${seed}", "steps=15", "seed=0,1")
"""Two runs, of which the first waits in its third step for a file `go`."""


@pytest.mark.slow
def test_two_processes_do_not_run_the_same_job(folder: Path) -> None:
    with Command("run", "-m", *TINY, "hydra.sweep.dir=sweep", *WAITS, cwd=folder) as command:
        command.until(lambda: len(runs(folder)) == 2 and steps_done(runs(folder)[0]) >= 2)
        seen = meshrunner("status", "sweep", cwd=folder)
        assert seen.code == 0 and "1 running, 1 pending" in seen.out and "/15 " in seen.out, seen
        other = meshrunner("resume", "sweep", cwd=folder)
        assert "is being executed by process" in other.out, other
        assert states(folder) == ["running", "completed"]
        (folder / "go").touch()
        assert command.wait(60).code == 0
    assert [status(run)["attempt"] for run in runs(folder)] == [1, 1]
    assert states(folder) == ["completed"] * 2


@pytest.mark.slow
def test_what_another_process_has_done_meanwhile_is_not_done_again(folder: Path) -> None:
    """The second run is executed from another shell while the first still trains."""
    with Command("run", "-m", *TINY, "hydra.sweep.dir=sweep", *WAITS, cwd=folder) as command:
        command.until(lambda: len(runs(folder)) == 2 and steps_done(runs(folder)[0]) >= 2)
        assert meshrunner("resume", str(runs(folder)[1]), cwd=folder).code == 0
        assert states(folder) == ["running", "completed"]
        (folder / "go").touch()
        ended = command.wait(90)
    assert ended.code == 0 and "001_seed-1 is completed" in ended.out, ended
    assert [status(run)["attempt"] for run in runs(folder)] == [1, 1]


FATES = {
    "1": ("failed", "rank 1: RuntimeError: the user's own mistake"),
    "3": ("failed", "rank 1 was killed by signal SIGSEGV"),
    "5": ("timeout", "no step was completed within launch.timeout_minutes(0.1): rank 1 hangs in step 2"),
    "7": ("failed", "rank 1 was killed by signal SIGKILL"),
    "9": ("oom", "out of host memory in step 2 (forward): tried to allocate 4.00 GiB"),
    "11": ("skipped", "shard(3) x replicate(1) x tensor(1) = 3, but launch.nodes(1) x launch.workers(2) = 2"),
}
"""Jobs of twelve, and what becomes of them; the other six complete."""


@pytest.mark.slow
def test_twelve_jobs_of_which_six_go_wrong(folder: Path) -> None:
    each = ("model.kind=faulty:Fated", "+model.job=${seed}", "parallelism.shard='${pick:${seed},{11:3},auto}'")
    limits = ("launch.host_memory_gib=1", "launch.timeout_minutes=0.1")
    arguments = ("run", "-m", *TINY, *each, *limits)
    with Command(*arguments, "seed=range(12)", "hydra.sweep.dir=sweep", cwd=folder) as command:
        ended = command.wait(240)
        command.check_nobody_left()
    assert ended.code == 1, ended
    assert len(runs(folder)) == 12
    for run in runs(folder):
        state, reason = FATES.get(run.name.partition("seed-")[2], ("completed", ""))
        found = status(run)
        assert found["state"] == state and reason in found["reason"], (run.name, found)
    rows = json.loads(meshrunner("compare", "sweep", "--json", cwd=folder).out)
    assert sorted(row["state"] for row in rows) == sorted([*(f[0] for f in FATES.values()), *["completed"] * 6])

    good = sweep(*each, *limits, "seed=0,2,4,6,8,10", "hydra.sweep.dir=good", cwd=folder)
    assert good.code == 0, good
    for alone in sorted((folder / "good").glob("0*")):
        (same,) = (folder / "sweep").glob(f"*_{alone.name.partition('_')[2]}")
        losses = [[row["train/loss"] for row in read_events(run)] for run in (alone, same)]
        assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.slow
def test_a_process_of_a_run_that_is_killed_is_a_failed_run(folder: Path) -> None:
    """Side by side every run has a process of its own. What it leaves behind is a row, and the others go on."""
    arguments = [
        "run",
        "-m",
        *TINY,
        "hydra.sweep.dir=sweep",
        "optimizer.kind=faulty:SlowAdamW",
        "steps=25",
        "seed=1,2,3",
    ]
    with Command(*arguments, "sweep.devices=4", cwd=folder) as command:
        command.until(lambda: len(runs(folder)) == 3 and min(map(steps_done, runs(folder)[:2])) >= 2)
        os.kill(status(runs(folder)[0])["owner"]["pid"], signal.SIGKILL)
        ended = command.wait(90)
        command.check_nobody_left()
    assert ended.code == 1, ended
    assert states(folder) == ["failed", "completed", "completed"]
    assert status(runs(folder)[0])["reason"] == "its process was killed by signal SIGKILL"
    again = meshrunner("resume", "sweep", cwd=folder)
    assert again.code == 0 and [status(run)["attempt"] for run in runs(folder)] == [2, 1, 1]


@pytest.mark.slow
def test_results_that_are_wanted_again_side_by_side(folder: Path) -> None:
    again = ("seed=1,2", "sweep.devices=4", "sweep.rerun=[completed]")
    assert sweep(*again, cwd=folder).code == sweep(*again, cwd=folder).code == 0
    assert [status(run)["attempt"] for run in runs(folder)] == [2, 2]

"""`meshrunner run` as its user sees it: the default run learns, repeats itself, and does not depend on the layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrunner.runner.process.cpu_binding import allowed_cpus
from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.states import read_status
from tests.composed import SMALL
from tests.e2e.command import own_classes

MESHRUNNER = Path(sys.executable).with_name("meshrunner")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module, as a user has one; none of the user's own is touched."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["MESHRUNNER_CACHE"] = str(folder)
    return folder


def meshrunner(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder and bring back what it printed."""
    return subprocess.run([MESHRUNNER, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def run(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A run that must complete: its rows and its summary."""
    done = meshrunner(folder.parent, "run", "tracker=none", f"hydra.run.dir={folder}", *overrides)
    assert done.returncode == 0, done.stderr
    assert read_status(folder).state == "completed"
    return read_events(folder), json.loads((folder / "summary.json").read_text())


def counted_s(rows: list[dict[str, Any]], tokens: float) -> float:
    """Seconds that the speeds of some steps, and saving between them, stand for; tokens: of a step, on a device."""
    return sum(tokens / row["perf/wps"] + row["perf/checkpoint_time_s"] for row in rows)


@pytest.mark.slow
def test_the_default_run_learns_real_text(tmp_path: Path) -> None:
    """Two ranks, FSDP2, the default model on the default text, W&B offline: nothing is chosen."""
    folder = tmp_path / "run"
    done = meshrunner(tmp_path, "run", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    rows, summary = read_events(folder), json.loads((folder / "summary.json").read_text())
    losses = [row["train/loss"] for row in rows]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert losses[0] - losses[-1] > 1.5
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert "warning" not in done.stderr.lower(), done.stderr
    assert f"{summary['perf/wps_median']:,.0f}" in done.stdout and "run directory: run" in done.stdout
    for row in rows:
        assert row["perf/tflops"] * 1e12 == pytest.approx(row["perf/wps"] * summary["model/flops_per_token"])
        assert 0 < row["perf/mfu_causal"] < row["perf/mfu"]
        assert row["perf/mfu"] == pytest.approx(100 * row["perf/tflops"] / summary["peak_tflops"])
        assert row["memory/peak_active_gib"] is None, "a CPU has no allocator whose peak could be known"
        assert row["memory/peak_rss_gib"] > 0.1
    assert rows[-1]["train/tokens"] == 30 * 8 * 256
    assert rows[-1]["time"] - rows[0]["time"] == pytest.approx(counted_s(rows[1:], 8 * 256 / 2), rel=0.01)
    assert json.loads((folder / "environment.json").read_text())["resolved"]["log_every"] == 1
    assert summary["model/params"] == 7_212_288 and summary["train/final_loss"] == losses[-1]
    for name in ("perf/step_time_s", "perf/data_time_s", "perf/cpu_time_s", "memory/peak_rss_gib"):
        values = summary[f"{name}_by_rank"]
        assert len(values) == 2 and min(values) >= 0, "a value of each rank"
    assert max(summary["memory/peak_rss_gib_by_rank"]) == pytest.approx(rows[-1]["memory/peak_rss_gib"], rel=1e-3)


@pytest.mark.slow
def test_the_same_command_gives_the_same_losses(tmp_path: Path) -> None:
    figures = []
    for name in ("a", "b"):
        rows, _ = run(tmp_path / name, "steps=6", "model.n_layers=2")
        figures.append([(row["train/loss"], row["train/grad_norm"]) for row in rows])
    assert figures[0] == figures[1]


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_the_training(tmp_path: Path) -> None:
    overrides = [override for override in SMALL if not override.startswith("data")]
    figures = {}
    for workers in (1, 2, 3, 4):
        rows, _ = run(tmp_path / f"{workers}", *overrides, "data.vocab_size=400", f"launch.workers={workers}")
        figures[workers] = [row["train/loss"] for row in rows] + [row["train/grad_norm"] for row in rows]
    for workers in (2, 3, 4):
        assert figures[workers] == pytest.approx(figures[1], rel=1e-5)
    assert figures[2] != figures[1], "were there really two workers?"


@pytest.mark.slow
def test_the_default_optimizer_keeps_1_to_4_workers_together(tmp_path: Path) -> None:
    """Its rate and warm-up are such that the last bit, in which layouts may differ, stays the last bit."""
    overrides = [override for override in SMALL if not override.startswith(("data", "optimizer", "steps"))]
    counts = ("data.vocab_size=400", "steps=8", "launch.workers=1,2,3,4")
    done = meshrunner(tmp_path, "run", "-m", "tracker=none", "hydra.sweep.dir=sweep", *overrides, *counts)
    assert done.returncode == 0, done.stderr
    one, *more = (read_events(folder) for folder in sorted((tmp_path / "sweep").glob("00*")))
    assert [row["train/lr"] for row in one] == pytest.approx([1e-4 * step for step in range(1, 9)])
    assert all(row["train/grad_norm"] > 0.2 for row in one), "clipping must bite, or it is not tested"
    assert len(more) == 3
    for rows in more:
        for key in ("train/loss", "train/grad_norm"):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in one], rel=2e-5)


@pytest.mark.slow
def test_a_run_too_short_to_be_measured_says_so_and_runs(tmp_path: Path) -> None:
    done = meshrunner(tmp_path, "run", "tracker=none", "hydra.run.dir=out", *SMALL, "steps=3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("measure_after=3 excludes all steps (steps=3)") == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["state"] == "completed" and summary["perf/wps_median"] is None and summary["train/final_loss"] > 0


@pytest.mark.slow
def test_reading_out_less_often_loses_no_row(tmp_path: Path) -> None:
    rows, _ = run(tmp_path / "often", *SMALL, "steps=7")
    seldom, _ = run(tmp_path / "seldom", *SMALL, "steps=7", "log_every=4")
    assert [row["step"] for row in seldom] == list(range(1, 8))
    assert [row["train/loss"] for row in seldom] == [row["train/loss"] for row in rows]


@pytest.mark.slow
def test_wps_accounts_for_slow_writing_of_rows(tmp_path: Path) -> None:
    """With three steps per reading and slow writes, WPS includes the writing. Saving a checkpoint has its own figure."""
    own_classes(tmp_path)
    overrides = ("steps=9", "log_every=3", "checkpoint=dcp", "checkpoint.every=5", "launch.workers=2")
    rows, summary = run(tmp_path / "out", *SMALL, *overrides, "model.kind=faulty:SlowReadOut", "+model.seconds=0.1")
    assert [row["step"] for row in rows if row["perf/checkpoint_time_s"]] == [6]
    took, writing = rows[-1]["time"] - rows[0]["time"], 0.1 * 6  # the rows of steps 1 to 6; those of 7 to 9 come after
    saving = rows[5]["perf/checkpoint_time_s"]
    assert counted_s(rows[1:], 12 * 34 / 2) == pytest.approx(took, rel=0.01)
    assert counted_s(rows[1:], 12 * 34 / 2) - saving >= writing, "writing rows counts"
    assert summary["perf/checkpoint_time_s"] > 0, "also of the last save"


def test_the_run_directory_holds_what_the_contract_says(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, *SMALL)
    for name in ("config.yaml", "overrides.yaml", "status.json", "events.jsonl", "summary.json", "environment.json"):
        assert (folder / name).stat().st_size > 0
    status = read_status(folder)
    assert status.attempt == 1 and [worker["rank"] for worker in status.workers] == [0, 1]
    assert {"host", "pid", "boot_id", "slurm_job_id"} <= set(json.loads((folder / "status.json").read_text())["owner"])
    assert status.started is not None and status.ended is not None and status.started < status.ended
    assert json.loads((folder / "environment.json").read_text())["packages"]["torch"]
    assert (folder / "logs" / "rank1.log").exists()
    found = json.loads((folder / "environment.json").read_text())["cpus"]
    assert found == [allowed_cpus()] * 2, "without GPUs no worker is bound"


@pytest.mark.slow
def test_resume_executes_a_directory_as_it_stands(tmp_path: Path) -> None:
    """A run of one machine, edited by hand and executed again: the same losses, because the directory is all there is."""
    rows, _ = run(tmp_path / "first", *SMALL)
    again = tmp_path / "again"
    again.mkdir()
    for name in ("config.yaml", "overrides.yaml"):
        (again / name).write_text((tmp_path / "first" / name).read_text())
    done = meshrunner(tmp_path, "resume", str(again))
    assert done.returncode == 0, done.stderr
    assert [row["train/loss"] for row in read_events(again)] == [row["train/loss"] for row in rows]
    done = meshrunner(tmp_path, "resume", str(again))
    assert done.returncode == 0 and "again is completed; nothing to do" in done.stdout


def test_a_sweep_skips_what_cannot_work_and_runs_the_rest(tmp_path: Path) -> None:
    done = meshrunner(
        tmp_path,
        "run",
        "-m",
        *SMALL,
        "tracker=none",
        "parallelism=fsdp2,hsdp2",
        "parallelism.shard=1,2",
        "hydra.sweep.dir=sweep",
    )
    assert done.returncode == 0, done.stderr
    folders = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [folder.name for folder in folders] == [
        "000_parallelism-fsdp2_shard-1",
        "001_parallelism-fsdp2_shard-2",
        "002_parallelism-hsdp2_shard-1",
        "003_parallelism-hsdp2_shard-2",
    ]
    states = [read_status(folder) for folder in folders]
    assert [status.state for status in states] == ["skipped", "completed", "completed", "skipped"]
    assert "shard(1) x replicate(1) x tensor(1) = 1, but" in states[0].reason
    assert len(json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]) == 4


@pytest.mark.slow
def test_fail_fast_leaves_the_rest_pending(tmp_path: Path) -> None:
    """The first of two runs fails for want of memory, so early that the C library may be the one to give up."""
    limits = "launch.host_memory_gib=0.0001,null"
    done = meshrunner(
        tmp_path, "run", "-m", *SMALL, "tracker=none", limits, "sweep.fail_fast=true", "hydra.sweep.dir=sweep"
    )
    states = [read_status(folder).state for folder in sorted((tmp_path / "sweep").glob("0*"))]
    assert states in (["oom", "pending"], ["failed", "pending"]), done.stderr
    assert "not started: sweep.fail_fast" in done.stdout


def test_one_wrong_job_stops_a_sweep_before_it_starts(tmp_path: Path) -> None:
    done = meshrunner(tmp_path, "run", "-m", *SMALL, "micro_batch=1,0", "seq_len=33,0", "hydra.sweep.dir=sweep")
    assert done.returncode == 2
    assert "job 1" in done.stderr and "job 2" in done.stderr and "job 3" in done.stderr
    assert not (tmp_path / "sweep").exists() or not list((tmp_path / "sweep").glob("0*"))


def test_show_explains_without_starting_anything(tmp_path: Path) -> None:
    done = meshrunner(
        tmp_path,
        "show",
        "model=llama3_70b",
        "launch.nodes=8",
        "launch.workers=8",
        "parallelism.replicate=8",
        "seq_len=8192",
        "micro_batch=1",
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "replicate(8) x shard(8)",
        "70,553,706,496",
        "layers.0 ... layers.79: 80 units",
        "64 sequences = 524,288 tokens",
    ):
        assert part in done.stdout
    assert not list(tmp_path.iterdir())


def test_doctor_names_what_is_missing(tmp_path: Path) -> None:
    done = meshrunner(tmp_path, "doctor")
    assert done.returncode == 0, done.stderr
    for part in ("torch", "backend gloo", "GPUs", "SLURM", "W&B login", "cache"):
        assert part in done.stdout


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["runn"], 2), (["run", "--help"], 0)])
def test_help(tmp_path: Path, arguments: list[str], code: int) -> None:
    done = meshrunner(tmp_path, *arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr

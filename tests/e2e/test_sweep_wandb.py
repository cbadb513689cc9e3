"""A sweep at W&B: a group, a run for every job, and the table of all at the end."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from meshrunner.runner.rundir.sweep import sweep_title
from tests.e2e.command import TINY, meshrunner, read, status
from tests.e2e.wandb_offline import OfflineRun, read_offline_run
from tests.e2e.wandb_stub import serving

SWEEP = ("run", "-m", *(each for each in TINY if not each.startswith("tracker")), "hydra.sweep.dir=sweep")


def offline(folder: Path) -> OfflineRun:
    """The only segment in a run or sweep directory."""
    (segment,) = folder.glob("wandb/offline-run-*/*.wandb")
    return read_offline_run(segment)


def table(logged: dict[str, Any], files: Path) -> list[dict[str, Any]]:
    """The rows of a W&B Table."""
    assert logged["comparison._type"] == "table-file"
    content = json.loads((files / logged["comparison.path"]).read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def compared(folder: Path) -> list[dict[str, Any]]:
    """What `meshrunner compare` says, repeats by the names of their directories."""
    rows: list[dict[str, Any]] = json.loads(meshrunner("compare", "sweep", "--json", cwd=folder).out)
    return [row | {"runs": ", ".join(Path(run["directory"]).name for run in row["runs"])} for row in rows]


@pytest.mark.slow
def test_offline_a_sweep_is_a_group_with_its_table(folder: Path) -> None:
    """Out of memory, and skipped; then the sweep is resumed."""
    jobs = ("micro_batch=1,3", "global_batch=2", "model.ffn_dim=200000", "launch.host_memory_gib=0.02")
    sweep = [each for each in SWEEP if not each.startswith("micro_batch")]
    ended = meshrunner(*sweep, *jobs, cwd=folder)
    assert ended.code == 0 and "meshrunner:" not in ended.err, ended
    assert [status(run)["state"] for run in sorted((folder / "sweep").glob("0*"))] == ["oom", "skipped"]
    run, shown = offline(folder / "sweep" / "000_micro-batch-1"), offline(folder / "sweep")
    group = sweep_title(folder / "sweep")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d micro_batch", group)
    assert (run.group, run.job_type, run.summary["state"]) == (group, "train", "oom")
    assert (shown.group, shown.job_type, shown.exit_code) == (group, "comparison", 0)
    assert shown.id != run.id and shown.notes == "\n".join(shown.summary["findings"])
    assert sorted(run.tags) == sorted(shown.tags) == ["data=random", "hardware=cpu"]
    assert run.config["launch"]["threads"] == 1 and run.config["parallelism"]["shard"] == 2, "what auto became"
    assert run.config["hardware"]["kind"] == "cpu" and run.config["versions"]["torch"]
    assert (shown.config["varies"], shown.config["runs"], shown.config["model"]["dim"]) == (["micro_batch"], 2, 32)
    assert shown.config["world_size"] == 2, "that of the run that began"
    (files,) = (folder / "sweep").glob("wandb/offline-run-*/files")
    (line,) = shown.history
    rows = table(line, files)
    assert rows == compared(folder)
    assert [row["state"] for row in rows] == ["oom", "skipped"]
    assert not list((folder / "sweep" / "001_micro-batch-3").glob("wandb"))

    assert meshrunner(*sweep, *jobs, "sweep.rerun=[oom]", cwd=folder).code == 0
    assert (offline(folder / "sweep").id, offline(folder / "sweep").group) == (shown.id, group)
    assert offline(folder / "sweep" / "000_micro-batch-1").id == run.id


@pytest.mark.slow
def test_online_a_sweep_that_is_resumed_continues_its_runs(folder: Path) -> None:
    faulty = ("model.kind=faulty:Raises", "+model.step=2,9")
    with serving() as stub:
        online = {"WANDB_BASE_URL": stub.url, "WANDB_API_KEY": "0123456789" * 4}
        command = (*SWEEP, *faulty, "tracker.mode=online", "tracker.tags=[mine]")
        ended = meshrunner(*command, cwd=folder, **online)
        assert ended.code == 1 and "tracker" not in ended.err, ended
        ids = {name: read(path / "tracker.json")["run_id"] for name, path in directories(folder).items()}
        assert sorted(stub.runs) == sorted(ids.values()) and len(ids) == 3
        group = sweep_title(folder / "sweep")
        kinds = {name: (stub.runs[id].upsert["groupName"], stub.runs[id].upsert["jobType"]) for name, id in ids.items()}
        assert kinds == {
            "000_step-2": (group, "train"),
            "001_step-9": (group, "train"),
            "sweep": (group, "comparison"),
        }
        assert [stub.runs[ids[name]].summary["state"] for name in ("000_step-2", "001_step-9")] == [
            "failed",
            "completed",
        ]
        assert {"data=random", "mine"} <= set(stub.runs[ids["000_step-2"]].upsert["tags"])
        assert stub.runs[ids["000_step-2"]].config["world_size"] == 2
        sent = stub.runs[ids["sweep"]]
        assert sent.config["world_size"] == 2 and {"data=random", "mine"} <= set(sent.upsert["tags"])
        assert received(sent.summary["comparison"], stub.uploads) == compared(folder)
        assert [row["state"] for row in compared(folder)] == ["failed", "completed"]

        again = meshrunner("resume", "sweep", cwd=folder, **online)
        assert again.code == 1, again
        assert sorted(stub.runs) == sorted(ids.values()), "one run for every job, and one table"
        assert len(sent.rows) == 2 and received(sent.summary["comparison"], stub.uploads) == compared(folder)


def directories(folder: Path) -> dict[str, Path]:
    """The sweep and its runs, by name."""
    return {path.name: path for path in [folder / "sweep", *sorted((folder / "sweep").glob("0*"))]}


def received(logged: dict[str, Any], uploads: dict[str, bytes]) -> list[dict[str, Any]]:
    content = json.loads(uploads[logged["path"]])
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


@pytest.mark.slow
def test_a_server_that_does_not_answer_costs_a_warning_at_the_end(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = meshrunner(
            *SWEEP,
            "seed=1,2",
            "tracker.mode=online",
            "tracker.finish_timeout_s=1",
            cwd=folder,
            within=120,
            WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
            WANDB_API_KEY="0123456789" * 4,
        )
    assert ended.code == 0 and "report page: sweep/report.html" in ended.out, ended
    warnings = [line for line in ended.err.splitlines() if "the sweep is not affected" in line]
    assert (
        len(warnings) == 1
        and "tracker wandb did not" in warnings[0]
        and "to track the sweep again: python -m meshrunner.runner" in warnings[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["tracker=none", "tracker=wandb tracker.mode=disabled", "tracker=tensorboard"])
def test_other_trackers_show_no_table(folder: Path, tracker: str) -> None:
    ended = meshrunner(*SWEEP, "seed=1,2", *tracker.split(), cwd=folder)
    assert ended.code == 0 and not ended.err, ended
    assert not (folder / "sweep" / "tracker.json").exists() and not (folder / "sweep" / "wandb").exists()

"""What trackers are told about a run, and which rows they are given."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from meshrunner.runner.process import tree as processes
from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.owner import claim
from meshrunner.runner.rundir.run import place_run
from meshrunner.runner.rundir.states import update_status
from meshrunner.runner.trackers.base import RunRecord, Tracker, tracker_of
from meshrunner.runner.trackers.process import RowBuffer, run_tracker
from tests.composed import option


def append(run_dir: Path, attempt: int, *steps: int) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "attempt": attempt}) + "\n")


def placed(run_dir: Path, **tracker: Any) -> Path:
    choices = {"parallelism": "fsdp2", "experiment": None, "hydra/launcher": "local", "model": "m" * 100}
    place_run({"steps": 3, "tracker": {"kind": "none"} | tracker}, run_dir, {"choices": choices})
    claim(run_dir)
    return run_dir


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "none"])
def test_the_yaml_lists_every_key_with_its_default(name: str) -> None:
    keys = option("tracker", name)
    cls = Tracker.resolve(keys["kind"])
    assert set(keys) == set(cls.model_fields)
    assert cls.model_validate(keys) == cls(kind=name)


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "on"}, {"project": "a/b"}, {"tags": ["t" * 65]}, {"finish_timeout_s": 0}, {"tag": ["a"]}],
)
def test_what_wandb_would_refuse_is_refused_before_the_run(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Tracker.resolve("wandb")).validate_python({"kind": "wandb"} | wrong)


@pytest.mark.parametrize(
    ("tracker", "active"),
    [({"kind": "none"}, False), ({"kind": "wandb", "mode": "disabled"}, False), ({"kind": "tensorboard"}, True)],
)
def test_a_tracker_with_nothing_to_do_is_not_active(tmp_path: Path, tracker: dict[str, Any], active: bool) -> None:
    assert tracker_of(RunRecord.load(placed(tmp_path / "run", **tracker))).active is active


def test_the_record_of_a_run_in_a_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep-1"
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}")
    run = RunRecord.load(placed(sweep / "000_a"))
    assert (run.name, run.group, run.attempt) == ("000_a", "sweep-1", 1)
    assert run.tags == ["parallelism=fsdp2", "model=" + "m" * 58]
    assert run.config["steps"] == 3


def test_a_single_run_has_no_group_and_keeps_its_id(tmp_path: Path) -> None:
    run_dir = placed(tmp_path / "run")
    first = RunRecord.load(run_dir)
    update_status(run_dir, state="preempted")
    claim(run_dir)
    second = RunRecord.load(run_dir)
    assert first.group is None
    assert (first.run_id, second.attempt) == (second.run_id, 2)


def test_rows_of_the_first_attempt_come_at_once(tmp_path: Path) -> None:
    rows = RowBuffer(tmp_path, attempt=1)
    append(tmp_path, 1, 1, 2)
    assert [row["step"] for row in rows.read(final=False)] == [1, 2]
    append(tmp_path, 1, 3)
    assert [row["step"] for row in rows.read(final=False)] == [3]
    assert rows.read(final=True) == []


def test_rows_of_earlier_attempts_wait_until_they_cannot_be_replaced(tmp_path: Path) -> None:
    append(tmp_path, 1, 1, 2, 3, 4, 5)
    rows = RowBuffer(tmp_path, attempt=2)
    assert rows.read(final=False) == []  # the second attempt may begin at any step
    append(tmp_path, 2, 3)
    given = rows.read(final=False)
    assert [(row["step"], row["attempt"]) for row in given] == [(1, 1), (2, 1), (3, 2)]
    append(tmp_path, 2, 4)
    given += rows.read(final=False) + rows.read(final=True)
    assert given == read_events(tmp_path)
    assert [(row["step"], row["attempt"]) for row in given[3:]] == [(4, 2)], (
        "step 5 was not reached again: it is out of date"
    )


def test_a_run_that_ended_is_replayed_by_hand(tmp_path: Path) -> None:
    run_dir = placed(tmp_path / "run")
    update_status(run_dir, state="completed")
    assert run_tracker(run_dir) == 0
    assert json.loads((run_dir / "tracker.json").read_text())["phase"] == "finished"


def test_descendants_are_found_and_end() -> None:
    with subprocess.Popen(["sh", "-c", "(sleep 60 & wait) & wait"]) as shell:
        while len(found := processes.descendants(shell.pid)) < 2 or processes.process_name(found[-1]) != "sleep":
            pass
        assert all(map(processes.is_alive, found))
        assert not processes.is_alive(processes.Process(shell.pid, started=0))  # another process had this id
        for process in found:
            processes.kill(process)
    while any(map(processes.is_alive, found)):
        pass

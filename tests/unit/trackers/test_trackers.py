"""Records and rows that trackers receive."""

from __future__ import annotations

import json
import re
import subprocess
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra.errors import ConfigCompositionException
from pydantic import TypeAdapter, ValidationError

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.consistency import remarks
from meshrunner.runner.config.devices import NodeDevices
from meshrunner.runner.config.experiment import check
from meshrunner.runner.launch.environment import resolved
from meshrunner.runner.process import tree as processes
from meshrunner.runner.rundir import sweep
from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.files import write_json
from meshrunner.runner.rundir.run import place_run
from meshrunner.runner.rundir.states import claim, update_status
from meshrunner.runner.rundir.sweep import add_runs
from meshrunner.runner.trackers.base import Tracker, tracker_of
from meshrunner.runner.trackers.description import RunRecord, SweepRecord
from meshrunner.runner.trackers.follow import RowBuffer, run_tracker
from meshrunner.runner.trackers.handle import TrackerHandle, Trackers
from tests.composed import config, experiment, option
from tests.e2e.command import TINY
from tests.run_dirs import make_run


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
def test_yaml_lists_every_key_with_its_default(name: str) -> None:
    keys = option("tracker", name)
    cls = Tracker.resolve(keys["kind"])
    assert set(keys) == set(cls.model_fields)
    assert cls.model_validate(keys) == cls(kind=name)


def test_several_yaml_lists_every_key() -> None:
    keys = option("tracker", "several")
    assert set(keys) == set(Tracker.resolve("several").model_fields)
    assert (keys["kind"], keys["of"]) == ("several", {})


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "on"}, {"project": "a/b"}, {"tags": ["t" * 65]}, {"finish_timeout_s": 0}, {"tag": ["a"]}],
)
def test_values_that_wandb_rejects_are_refused_before_the_run(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Tracker.resolve("wandb")).validate_python({"kind": "wandb"} | wrong)


@pytest.mark.parametrize(
    ("tracker", "active"),
    [({"kind": "none"}, False), ({"kind": "wandb", "mode": "disabled"}, False), ({"kind": "tensorboard"}, True)],
)
def test_none_and_disabled_trackers_are_inactive(tmp_path: Path, tracker: dict[str, Any], active: bool) -> None:
    assert tracker_of(RunRecord.load(placed(tmp_path / "run", **tracker))).active is active


def test_run_record_names_run_group_and_tags(tmp_path: Path) -> None:
    folder = tmp_path / "sweep-1"
    folder.mkdir()
    (folder / "sweep.json").write_text("{}")
    run = RunRecord.load(placed(folder / "000_a"))
    assert (run.name, run.group, run.attempt) == ("000_a", "sweep-1", 1)
    assert run.tags == ["model=" + "m" * 58], "fsdp2 is the default, and a launcher is no setting"
    assert run.config["steps"] == 3


def test_group_is_date_and_varying_keys_and_survives_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [[f"parallelism=fsdp{i}", "steps=3", f"optimizer.lr={lr}"] for i in (1, 2) for lr in (0.1, 0.2)]
    add_runs(tmp_path, [(f"{number:03}", overrides) for number, overrides in enumerate(jobs)])
    group = RunRecord.load(placed(tmp_path / "000")).group
    assert group is not None and re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d parallelism x lr", group)
    monkeypatch.setattr(sweep, "datetime", None)  # it is not asked again
    add_runs(tmp_path, [("004", ["parallelism=fsdp1", "steps=9", "optimizer.lr=0.1"])])
    assert RunRecord.load(tmp_path / "000").group == group


@pytest.mark.parametrize(
    ("runs", "title"),
    [
        ([("000_seed-0", ["steps=3"]), ("000_seed-1", ["steps=3"])], "seed"),
        ([("000", ["lr=0.1", "tracker=wandb"]), ("001", ["lr=0.1", "tracker=tensorboard"])], "sweep-2"),
        ([("000", [f"{key}=1" for key in "abcdef"])], "a x b x c x d and 2 more"),
        ([("000", ["steps=3", "+model.dim=64", "tracker=[wandb,tensorboard]"])], "dim"),
    ],
)
def test_sweep_title_lists_varying_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[str, list[str]]], title: str
) -> None:
    monkeypatch.setattr("sys.argv", ["meshrunner", "run", "-m", "steps=3", "+model.dim=interval(1,9)"])
    (folder := tmp_path / "sweep-2").mkdir()
    add_runs(folder, runs)
    assert sweep.sweep_title(folder)[len("2026-01-31 14:05 ") :] == title


def test_description_resolves_auto(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = {
        "launch": {"nodes": 3, "workers": "auto", "threads": "auto"},
        "parallelism": {"kind": "fsdp2", "shard": "auto"},
        "data": {"kind": "stdlib", "vocab_size": "auto"},
        "global_batch": None,
        "steps": 3,
    }
    place_run(config, run_dir, {"choices": {"parallelism": "hsdp2"}})
    run = RunRecord.load(run_dir)
    assert run.describe()["launch"] == config["launch"] and "world_size" not in run.describe()
    resolved = {"launch.workers": 2, "launch.threads": 1, "parallelism.shard": 2, "global_batch": 8, "gone.key": 1}
    packages = {"torch": "2.13.0", "torchao": None}
    environment = {"resolved": resolved, "packages": packages, "python": "3.12.1", "git_commit": "abc", "host": "node1"}
    write_json(run_dir / "environment.json", environment | {"device_type": "cpu"})
    assert "world_size" not in run.describe()
    write_json(run_dir / "environment.json", environment | {"device_type": "cpu", "workers": 2})
    assert run.describe()["world_size"] == 6, "nodes x workers"
    summary = {"world_size": 2, "device": "Xeon", "data": {"tokenizer_vocab": 4000}}
    write_json(run_dir / "summary.json", summary)
    description = run.describe()
    assert description.pop("directory") == str(run_dir)
    assert description == {
        "launch": {"nodes": 3, "workers": 2, "threads": 1},
        "parallelism": {"kind": "fsdp2", "shard": 2},
        "data": {"kind": "stdlib", "vocab_size": 4000},
        "global_batch": 8,
        "steps": 3,
        "options": {"parallelism": "hsdp2"},
        "world_size": 2,
        "device": "Xeon",
        "device_type": "cpu",
        "host": "node1",
        "commit": "abc",
        "versions": {"torch": "2.13.0", "python": "3.12.1"},
    }
    assert run.config == config, "what is on record stays"


def test_description_resolves_auto_precision(tmp_path: Path) -> None:
    environment = {"resolved": {"precision.kind": "bf16"}}
    run = RunRecord.load(make_run(tmp_path / "run", "precision=auto", environment=environment))
    description = run.describe()
    assert (description["precision"]["kind"], description["options"]["precision"]) == ("bf16", "bf16")
    assert not [tag for tag in run.tags if "precision" in tag], "it is the default"


@pytest.mark.parametrize("written", ["[]", '{"resolved": 3, "packages": [1]}', '{"resolved": {"steps.x": 1}}'])
def test_damaged_environment_does_not_fail_the_description(tmp_path: Path, written: str) -> None:
    run_dir = placed(tmp_path / "run")
    (run_dir / "environment.json").write_text(written)
    assert RunRecord.load(run_dir).describe()["steps"] == 3


def test_a_resumed_run_records_the_batch_of_its_checkpoint() -> None:
    """`resolved` is given the experiment as it continues, whose global batch no longer follows from the ranks."""
    assert resolved(experiment("hardware=cpu").on("cpu"), NodeDevices("cpu", 2, 1)) == {
        "launch.workers": 2,
        "launch.threads": 1,
        "parallelism.shard": 2,
        "parallelism.replicate": 1,
        "parallelism.reshard_after_forward": "always",
        "precision.kind": "fp32",
        "log_every": 1,
        "global_batch": 8,
        "hardware.kind": "cpu",
    }
    continued = experiment("parallelism=ddp", "global_batch=24")
    found = resolved(continued, NodeDevices("cuda", 3, 4))
    assert (found["parallelism.replicate"], found["global_batch"], found["hardware.kind"]) == (3, 24, "gpu")
    assert found["parallelism.reshard_after_forward"] == "never"
    assert found["log_every"] == 10, "each reading waits for the device"
    assert resolved(experiment("log_every=3"), NodeDevices("cuda", 2, 4))["log_every"] == 3


def test_sweep_record_contains_facts_that_runs_share(tmp_path: Path) -> None:
    for number, parallelism in enumerate(("fsdp1", "fsdp2", "fsdp2")):
        run_dir = make_run(
            tmp_path / f"{number:03}",
            f"parallelism={parallelism}",
            "precision=bf16",
            environment={"git_commit": "abc", "packages": {"torch": "2.13.0"}, "host": f"node{number}"},
            summary={"world_size": 2},
        )
        assert RunRecord.load(run_dir).tags[-1] == "precision=bf16"
    make_run(tmp_path / "003", "parallelism=fsdp1_tp", "precision=bf16", state="skipped")
    jobs = [{"name": f"{number:03}", "overrides": []} for number in range(4)]
    write_json(
        tmp_path / "sweep.json", {"created": "2026-01-31T14:05:09+01:00", "varies": ["parallelism"], "jobs": jobs}
    )
    found = SweepRecord.load(tmp_path)
    assert found.group == "2026-01-31 14:05 parallelism"
    assert found.tags == ["data=random", "precision=bf16"]
    shared = found.shared
    assert (shared["varies"], shared["runs"], shared["world_size"], shared["commit"]) == (["parallelism"], 4, 2, "abc")
    assert shared["versions"] == {"torch": "2.13.0"} and shared["options"]["precision"] == "bf16"
    assert "host" not in shared and "kind" not in shared["parallelism"] and "parallelism" not in shared["options"]
    assert shared["parallelism"]["tensor"] == 1 and shared["model"]["dim"] == 32


SEVERAL = {"wandb": {"kind": "wandb"}, "tensorboard": {"kind": "tensorboard"}}


@pytest.mark.parametrize("typed", ["tracker=[wandb,tensorboard]", "tracker=[ tensorboard , wandb ]"])
def test_several_trackers_are_a_list_of_options(typed: str) -> None:
    composed = Composer("run", [typed, "tracker.of.wandb.mode=online", "steps=3"]).single_run()
    assert composed is not None
    assert composed.overrides["choices"]["tracker"] == "several"
    assert not [group for group in composed.overrides["choices"] if "@" in group]
    assert composed.overrides["task"] == [typed.replace(" ", ""), "tracker.of.wandb.mode=online", "steps=3"]
    members = check(composed.config).tracker.members
    assert {name: (tracker.kind, getattr(tracker, "mode", "")) for name, tracker in members.items()} == {
        "wandb": ("wandb", "online"),
        "tensorboard": ("tensorboard", ""),
    }


def test_several_trackers_in_a_sweep_are_recorded_as_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["place", "-m", *TINY, "tracker=[wandb,tensorboard]", "seed=1,2", f"hydra.sweep.dir={tmp_path / 's'}"]
    assert cli._dispatch(command) == 0
    assert [run.name for run in sorted((tmp_path / "s").glob("0*"))] == ["000_seed-1", "001_seed-2"]
    found = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert found["varies"] == ["seed"]
    for job in found["jobs"]:
        assert "tracker=[wandb,tensorboard]" in job["overrides"] and "@" not in "".join(job["overrides"])
        assert list(RunRecord.load(tmp_path / "s" / job["name"]).config["tracker"]["of"]) == ["wandb", "tensorboard"]


def test_one_tracker_in_a_list_is_that_tracker() -> None:
    assert config("tracker=[tensorboard]")["tracker"]["kind"] == "tensorboard"


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["tracker=[wandb,wandb]"], "tracker@tracker.of.wandb appears more than once"),
        (["tracker=several"], "no tracker is named"),
        (["tracker=[wandb,several]"], "no tracker is named"),
        (["tracker=[wandb,tensorboard]", "tracker.of.tensorboard.kind=wandb"], "2 trackers of kind 'wandb'"),
    ],
)
def test_invalid_several_trackers_are_refused(overrides: list[str], error: str) -> None:
    with pytest.raises((ConfigError, ConfigCompositionException), match=re.escape(error)):
        experiment(*overrides)


def test_inactive_members_of_several_trackers_start_no_process(tmp_path: Path) -> None:
    none = {"a": {"kind": "none"}, "b": {"kind": "wandb", "mode": "disabled"}}
    tracker = tracker_of(RunRecord.load(placed(tmp_path / "other", kind="several", of=none)))
    assert not any(member.active for member in tracker.members.values())
    assert Trackers(tmp_path / "other", tracker).finish_or_warn("") is None
    assert not (tmp_path / "other" / "tracker-a.json").exists(), "no process was started"


def test_a_tracker_process_that_cannot_start_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ForkServerProcess, "start", start)
    tracker = tracker_of(RunRecord.load(placed(tmp_path / "run", kind="wandb", mode="offline")))
    warning = TrackerHandle(tmp_path / "run", tracker).finish()
    assert warning is not None and "could not be started (OSError: [Errno 24] Too many open files)" in warning


def test_a_single_run_has_no_group_and_keeps_its_id(tmp_path: Path) -> None:
    run_dir = placed(tmp_path / "run")
    first = RunRecord.load(run_dir)
    update_status(run_dir, state="preempted")
    claim(run_dir)
    second = RunRecord.load(run_dir)
    assert first.group is None
    assert (first.run_id, second.attempt) == (second.run_id, 2)


def test_rows_of_first_attempt_are_returned_immediately(tmp_path: Path) -> None:
    rows = RowBuffer(tmp_path, attempt=1)
    append(tmp_path, 1, 1, 2)
    assert [row["step"] for row in rows.read(final=False)] == [1, 2]
    append(tmp_path, 1, 3)
    assert [row["step"] for row in rows.read(final=False)] == [3]
    assert rows.read(final=True) == []


def test_rows_of_earlier_attempts_wait_until_final(tmp_path: Path) -> None:
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


def test_ended_run_can_be_tracked_again(tmp_path: Path) -> None:
    run_dir = placed(tmp_path / "run")
    update_status(run_dir, state="completed")
    assert run_tracker(run_dir) == 0
    assert json.loads((run_dir / "tracker.json").read_text())["phase"] == "finished"


def test_descendants_are_found_and_killed() -> None:
    with subprocess.Popen(["sh", "-c", "(sleep 60 & wait) & wait"]) as shell:
        while len(found := processes.descendants(shell.pid)) < 2 or processes.process_name(found[-1]) != "sleep":
            pass
        assert all(map(processes.is_alive, found))
        earlier = psutil.Process(shell.pid)
        earlier._ident = (shell.pid, 0.0)  # another process had this id
        assert not processes.is_alive(earlier)
        for process in found:
            processes.kill(process)
    while any(map(processes.is_alive, found)):
        pass


def test_online_without_a_login_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("NETRC", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    online = ("tracker=wandb", "tracker.mode=online")
    said = [each for each in remarks(experiment(*online)) if "wandb login" in each]
    assert len(said) == 1 and said[0].startswith("tracker.mode=online: not logged in to W&B")
    assert not any("wandb login" in each for each in remarks(experiment("tracker=wandb")))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123456789\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert not any("wandb login" in each for each in remarks(experiment(*online)))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com:8443")
    assert any("wandb login" in each for each in remarks(experiment(*online)))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    assert not any("wandb login" in each for each in remarks(experiment(*online)))

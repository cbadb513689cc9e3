"""A tracker shows what events.jsonl holds, and one that goes wrong costs one warning. The runs here train nothing."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshrunner.runner.process.tree import descendants, is_alive, kill, process_name
from meshrunner.runner.rundir.events import StepRow, read_events
from meshrunner.runner.rundir.files import tracking, write_json
from meshrunner.runner.rundir.records import Tracking
from meshrunner.runner.rundir.run import place_run
from meshrunner.runner.rundir.states import claim, update_status
from meshrunner.runner.trackers.base import tracker_of
from meshrunner.runner.trackers.description import RunRecord
from meshrunner.runner.trackers.follow import run_tracker, track_again
from meshrunner.runner.trackers.handle import TrackerHandle, Trackers
from tests.e2e.wandb_offline import OfflineRun, read_offline_run
from tests.e2e.wandb_stub import Stub

BOUND_S = 300
"""For what takes a second or two on an idle machine."""
SUMMARY = {"perf/wps_median": 1234.5, "world_size": 2, "train/final_loss": 2.25, "perf/mfu_median": None}


class Run:
    """A run directory that lives as one does while its workers train."""

    def __init__(self, run_dir: Path, **tracker: Any) -> None:
        self.run_dir = run_dir
        config = {
            "model": {"kind": "llama", "dim": 256},
            "steps": 10,
            "launch": {"workers": "auto"},
            "tracker": {"finish_timeout_s": BOUND_S} | tracker,
        }
        place_run(config, run_dir, {"choices": {"parallelism": "fsdp1", "hydra/launcher": "local"}})
        self.handle: TrackerHandle | None = None

    def begin(self) -> Run:
        self.attempt = claim(self.run_dir).attempt
        self.handle = TrackerHandle(self.run_dir, tracker_of(RunRecord.load(self.run_dir)))
        return self

    def train(self, first: int, last: int) -> Run:
        """Rows of some steps, after what a run knows by its first."""
        environment = {"resolved": {"launch.workers": 2}, "git_commit": "abc", "packages": {"torch": "2.13.0"}}
        write_json(self.run_dir / "environment.json", environment)
        write_json(self.run_dir / "summary.json", {"world_size": 2})
        with (self.run_dir / "events.jsonl").open("a") as file:
            for step in range(first, last + 1):
                figures = {"train/loss": 3.0 / step, "train/tokens": 2048 * step, "perf/mfu": None}
                file.write(json.dumps({"step": step, "attempt": self.attempt} | figures) + "\n")
                file.flush()
        return self

    def end(self, state: str = "completed", reason: str = "", pause: float = 0) -> str | None:
        """The run's end, with a pause before its summary; returns the tracker's warning."""
        assert self.handle is not None
        update_status(self.run_dir, state=state, reason=reason)
        time.sleep(pause)
        write_json(self.run_dir / "summary.json", SUMMARY)
        return self.handle.finish()

    def wait(self, phase: str) -> Run:
        until(lambda: Tracking.read(tracking(self.run_dir)).phase == phase)
        return self

    def processes(self) -> list[psutil.Process]:
        """Of the tracker: its own, then those that it started."""
        assert self.handle is not None and self.handle.process is not None
        pid = self.handle.process.pid
        assert pid is not None
        return [process for process in descendants(os.getpid()) if process.pid == pid] + descendants(pid)

    @property
    def rows(self) -> list[StepRow]:
        """What a tracker should show: the last row of each step, without unknown figures."""
        return [{key: value for key, value in row.items() if value is not None} for row in read_events(self.run_dir)]

    @property
    def offline(self) -> OfflineRun:
        (segment,) = self.run_dir.glob("wandb/offline-run-*/*.wandb")
        return read_offline_run(segment)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a tracker started is known by its environment, whoever its parent is by now."""
    forkserver.ensure_running()  # which stays, so it must not be marked
    monkeypatch.setenv("STARTED_BY_TEST", str(tmp_path))
    yield
    until(lambda: not started_by(tmp_path))


def started_by(tmp_path: Path) -> list[str]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"STARTED_BY_TEST={tmp_path}\0".encode() in environ.read_bytes():
                found.append(environ.with_name("comm").read_text())
    return found


def history(lines: list[dict[str, Any]]) -> list[StepRow]:
    """W&B's history without what W&B adds to it."""
    assert [line["_step"] for line in lines] == [line["step"] for line in lines]
    return [{key: value for key, value in line.items() if not key.startswith("_")} for line in lines]


def test_wandb_offline_holds_the_run_and_touches_no_network(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", stub.url)
    (tmp_path / "sweep.json").write_text("{}")
    run = Run(tmp_path / "000_a", kind="wandb", project="speed", tags=["mine"]).begin().train(1, 5)
    run.wait("following").train(6, 10)
    assert run.end() is None
    written = run.offline
    assert history(written.history) == run.rows
    assert len(run.rows) == 10
    expected = {key: value for key, value in SUMMARY.items() if value is not None} | {
        "state": "completed",
        "reason": "",
    }
    assert {key: written.summary[key] for key in expected} == expected
    assert "perf/mfu_median" not in written.summary
    assert (written.project, written.name, written.group, written.job_type) == (
        "speed",
        "000_a",
        tmp_path.name,
        "train",
    )
    assert written.tags == ["parallelism=fsdp1", "mine"]
    assert written.config["model"] == {"kind": "llama", "dim": 256}
    assert written.config["launch"] == {"workers": 2}, "what auto became"
    assert (written.config["world_size"], written.config["commit"]) == (2, "abc")
    assert written.config["options"] == {"parallelism": "fsdp1"}
    assert written.axes == {"train/*": "train/tokens"}
    assert {"step", "time", "attempt", "train/tokens"} <= written.hidden
    assert written.exit_code == 0
    assert stub.requests == []


@pytest.mark.slow_cases("oom")
@pytest.mark.parametrize("state", ["oom", "preempted"])
def test_wandb_shows_how_a_run_ended(tmp_path: Path, state: str) -> None:
    run = Run(tmp_path / "run", kind="wandb").begin().train(1, 2)
    assert run.end(state, "rank 1 said so") is None
    written = run.offline
    assert (written.summary["state"], written.summary["reason"]) == (state, "rank 1 said so")
    assert written.exit_code == 1
    assert written.preempting == (state == "preempted")


@pytest.mark.slow
def test_wandb_offline_keeps_one_segment_with_all_rows_of_a_resumed_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind="wandb").begin().train(1, 6)
    assert run.end("interrupted") is None
    first = run.offline
    assert run.begin().wait("following").train(5, 9).end() is None
    assert history(run.offline.history) == run.rows
    assert [row["attempt"] for row in run.rows] == [1] * 4 + [2] * 5
    assert run.offline.id == first.id


def test_wandb_online_receives_the_run_and_continues_it(tmp_path: Path, stub: Stub) -> None:
    run = Run(tmp_path / "run", kind="wandb", mode="online", entity="me").begin().train(1, 6)
    assert run.end("failed", "rank 1 raised") is None
    ((name, received),) = stub.runs.items()
    assert received.rows == run.rows
    assert (received.summary["state"], received.summary["reason"]) == ("failed", "rank 1 raised")
    assert received.summary["perf/wps_median"] == SUMMARY["perf/wps_median"]
    assert received.exit_code == 1
    assert received.config["model"]["dim"] == 256
    before = run.rows

    assert run.begin().train(5, 9).end() is None
    assert list(stub.runs) == [name]
    assert received.rows == before + run.rows[6:]  # what was sent stays: W&B only appends
    assert "rows up to step 6; sending only later rows" in (run.run_dir / "logs" / "tracker.log").read_text()
    assert received.exit_code == 0
    assert received.summary["state"] == "completed"


def test_wandb_online_without_a_key_neither_asks_nor_hangs(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    warning = Run(tmp_path / "run", kind="wandb", mode="online").begin().train(1, 2).end()
    assert warning is not None
    assert "tracker wandb failed (UsageError: No API key configured. Use `wandb login`" in warning


def test_a_server_that_never_answers_costs_the_time_limit(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        run = Run(tmp_path / "run", kind="wandb", mode="online", finish_timeout_s=0.5).begin().train(1, 2)
        until(lambda: len(run.processes()) > 1)
        own = run.processes()
        warning = run.end()  # returns at all: the server never answers
    assert warning is not None
    assert "did not start" in warning
    until(lambda: not any(map(is_alive, own)))


@pytest.mark.slow
def test_wandb_core_killed_while_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind="wandb").begin().train(1, 3).wait("following")
    (core,) = (process for process in run.processes() if process_name(process).startswith("wandb-core"))
    kill(core)
    warning = run.train(4, 6).end()
    assert warning is not None
    assert "wandb-core" in warning
    assert "ended before the run did" in warning
    assert run_tracker(run.run_dir) == 0  # as the warning proposes
    assert history(run.offline.history) == run.rows


def test_the_tracker_killed_while_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind="wandb").begin().train(1, 3).wait("following")
    own = run.processes()
    assert len(own) > 1
    kill(own[0])
    until(lambda: not any(map(is_alive, own)))  # wandb-core ends by itself
    warning = run.train(4, 6).end()
    assert warning is not None
    assert "was killed by SIGKILL in phase 'following'" in warning


@pytest.mark.slow
def test_the_launching_process_killed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind="wandb")
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from meshrunner.runner.rundir.states import claim\nfrom meshrunner.runner.trackers.base import tracker_of\n"
        "from meshrunner.runner.trackers.description import RunRecord\n"
        "from meshrunner.runner.trackers.handle import TrackerHandle\n"
        "run_dir = Path(sys.argv[1]); claim(run_dir)\n"
        "handle = TrackerHandle(run_dir, tracker_of(RunRecord.load(run_dir))); time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(run.run_dir)]) as launcher:
        run.wait("following")
        own = descendants(launcher.pid)
        assert any(process_name(process).startswith("wandb-core") for process in own)
        launcher.kill()
    until(lambda: not any(map(is_alive, own)))


@pytest.mark.slow_cases("hang*")
@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        ("raise at open", "failed (ValueError: no account)"),
        ("raise in log", "failed (KeyError: 'train/loss')"),
        ("exit in log", "failed (SystemExit: 0)"),
        ("crash in log", "was killed by SIGSEGV in phase 'following'"),
        ("hang at open", "did not start within 3 s of the run's end"),
        ("hang in finish", "did not finish within 3 s of the run's end"),
    ],
)
def test_a_tracker_in_trouble_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trouble: str, expected: str
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    limit = 3 if "hang" in trouble else BOUND_S  # trackers yield to what trains: on a busy machine they need patience
    run = Run(tmp_path / "run", kind="own_trackers:ToFile", trouble=trouble, finish_timeout_s=limit).begin().train(1, 5)
    if "hang" in trouble:
        run.wait("opening" if "open" in trouble else "following")
    if trouble == "hang at open":
        until(lambda: "hangs" in (run.run_dir / "logs" / "tracker.log").read_text())
    warning = run.end()  # returns at all: what hangs does so for ever
    assert warning is not None
    assert warning.startswith(f"tracker own_trackers:ToFile {expected}")
    assert "\n" not in warning
    assert capfd.readouterr() == ("", "")
    assert len(run.rows) == 5
    if "crash" not in trouble:
        assert "own_trackers.py" in (run.run_dir / "logs" / "tracker.log").read_text()  # the traceback or the stack


def test_a_users_own_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    run = Run(tmp_path / "run", kind="own_trackers:ToFile").begin().train(1, 5).wait("following").train(6, 7)
    assert run.end("oom", "out of memory", pause=1) is None
    *rows, last = map(json.loads, (run.run_dir / "own_tracker.jsonl").read_text().splitlines())
    assert rows == read_events(run.run_dir)
    assert last == {"summary": SUMMARY, "state": "oom", "reason": "out of memory", "nice": 19}


def test_tensorboard_shows_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind="tensorboard").begin().train(1, 6)
    assert run.end("interrupted") is None
    assert run.begin().train(5, 9).end() is None
    shown = json.loads(
        subprocess.check_output([sys.executable, "-c", READ_BACK, run.run_dir / "tensorboard"], text=True)
    )
    assert shown["files"] == 1
    for key in ("train/loss", "train/tokens"):
        expected = [(row["step"], row[key]) for row in run.rows]
        assert [step for step, _ in shown["scalars"][key]] == [step for step, _ in expected]
        assert all(
            math.isclose(a, b, rel_tol=1e-7) for (_, a), (_, b) in zip(shown["scalars"][key], expected, strict=True)
        )
    assert not {"perf/mfu", "attempt", "step", "time"} & shown["scalars"].keys()
    assert "dim: 256" in shown["texts"]["config/text_summary"]
    assert "1234.5" in shown["texts"]["summary/text_summary"]
    assert shown["texts"]["state/text_summary"] == "completed"


READ_BACK = """
import json, sys
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0}).Reload()
print(json.dumps({
    "files": len(list(Path(sys.argv[1]).glob("events.*"))),
    "scalars": {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]},
    "texts": {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]},
}))
"""
"""In a process of its own: TensorBoard's imports warn about what they use."""


@pytest.mark.slow
def test_tensorboards_hparams_tab_has_settings_and_results(tmp_path: Path) -> None:
    """Two runs of a sweep, one of them resumed; what the tab shows is asked of TensorBoard itself."""
    for name, state in (("000", "completed"), ("001", "oom")):
        run = Run(tmp_path / name, kind="tensorboard").begin().train(1, 3)
        assert run.end(state) is None
    assert run.begin().train(1, 2).end("failed") is None
    shown = json.loads(
        subprocess.check_output([sys.executable, "-W", "ignore", "-c", READ_HPARAMS, tmp_path], text=True)
    )
    assert [session["name"] for session in shown] == ["000/tensorboard/hparams", "001/tensorboard/hparams"]
    assert [session["status"] for session in shown] == ["STATUS_SUCCESS", "STATUS_FAILURE"]
    for session in shown:
        settings = {
            "parallelism": "fsdp1",
            "model.kind": "llama",
            "model.dim": 256,
            "steps": 10,
            "launch.workers": 2,
            "world_size": 2,
            "torch": "2.13.0",
            "commit": "abc",
        }
        assert session["hparams"] == settings
        assert session["metrics"] == {"perf/wps_median": 1234.5, "train/final_loss": 2.25}, "and no curve"


READ_HPARAMS = """
import json, sys
from google.protobuf.json_format import MessageToDict
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
multiplexer = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(sys.argv[1])
multiplexer.Reload()
provider = data_provider.MultiplexerDataProvider(multiplexer, sys.argv[1])
context = backend_context.Context(base_plugin.TBContext(data_provider=provider, multiplexer=multiplexer))
every = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
request = api_pb2.ListSessionGroupsRequest(allowed_statuses=every, slice_size=100)
answer = list_session_groups.Handler(RequestContext(), context, "", request).run()
print(json.dumps(sorted(({
    "name": group.name,
    "status": api_pb2.Status.Name(group.sessions[0].status),
    "hparams": {key: MessageToDict(value) for key, value in group.hparams.items()},
    "metrics": {each.name.tag: each.value for each in group.sessions[0].metric_values},
} for group in answer.session_groups), key=lambda group: group["name"])))
"""


@pytest.mark.slow
def test_several_trackers_each_show_the_run(tmp_path: Path) -> None:
    run = Several(tmp_path / "run", wandb={"kind": "wandb"}, tensorboard={"kind": "tensorboard"}).begin().train(1, 3)
    run.finish()
    assert history(run.offline.history) == run.rows
    assert list(run.run_dir.glob("tensorboard/events.*"))
    assert Tracking.read(tracking(run.run_dir)).run_id == run.offline.id


@pytest.mark.slow_cases("hang in finish")
@pytest.mark.parametrize("trouble", ["crash in log", "hang in finish"])
def test_one_of_several_trackers_in_trouble_does_not_take_the_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    bad = {"kind": "own_trackers:ToFile", "trouble": trouble, "finish_timeout_s": 3 if "hang" in trouble else BOUND_S}
    run = Several(tmp_path / "run", bad=bad, tensorboard={"kind": "tensorboard"}).begin().train(1, 4)
    run.finish()
    out, err = capfd.readouterr()
    (warning,) = err.splitlines()
    assert "tracker own_trackers:ToFile" in warning and "logs/tracker-bad.log" in warning and not out
    assert warning.endswith(f"meshrunner.runner.trackers.follow {run.run_dir} bad)")
    assert Tracking.read(tracking(run.run_dir, "tensorboard")).phase == "finished"
    (events,) = run.run_dir.glob("tensorboard/hparams/events.*")
    assert b"session_end_info" in events.read_bytes()


def test_several_trackers_are_fed_again_by_hand(tmp_path: Path) -> None:
    both = {"first": {"kind": "tests.e2e.own_trackers:ToFile"}, "second": {"kind": "tensorboard"}}
    run = Several(tmp_path / "run", **both).train(1, 2)
    update_status(run.run_dir, state="completed")
    assert track_again(run.run_dir, "second") == 0
    assert not (run.run_dir / "own_tracker.jsonl").exists()
    assert track_again(run.run_dir) == 0
    assert len((run.run_dir / "own_tracker.jsonl").read_text().splitlines()) == 3


class Several(Run):
    """A run that several trackers follow."""

    def __init__(self, run_dir: Path, **members: dict[str, Any]) -> None:
        super().__init__(run_dir, kind="several", of={k: {"finish_timeout_s": BOUND_S} | v for k, v in members.items()})
        self.attempt = 1

    def begin(self) -> Several:
        self.attempt = claim(self.run_dir).attempt
        self.trackers = Trackers(self.run_dir, tracker_of(RunRecord.load(self.run_dir)))
        return self

    def finish(self) -> None:
        """The run's end; warnings of its trackers are printed."""
        update_status(self.run_dir, state="completed")
        write_json(self.run_dir / "summary.json", SUMMARY)
        self.trackers.finish_or_warn("")


def test_no_tracker_starts_no_process(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind="none").begin().train(1, 2)
    assert run.handle is not None
    assert run.handle.process is None
    assert run.end() is None
    assert not (run.run_dir / "wandb").exists()

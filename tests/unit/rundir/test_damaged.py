"""Sweeps of which one run is damaged: every verb says so, shows the good run, and touches nothing outside the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from meshrunner.runner import cli
from meshrunner.runner.compare.runs import glance, read_runs
from meshrunner.runner.console import UNPRINTABLE
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.rundir.files import write_json
from meshrunner.runner.slurm import client, submit
from meshrunner.runner.sweep import execute_all
from meshrunner.runner.verbs.launching import resume
from meshrunner.runner.verbs.records import cancel
from tests.e2e.command import TINY
from tests.run_dirs import make_run

GOOD, BAD = "000_seed-1", "001_seed-2"
OUTSIDE = "text of a file outside"
LONGEST_S = 20
"""Far more than any verb takes: what is longer hangs."""


class Damage:
    """What is done to a run directory."""

    def __init__(self, run: Path, outside: Path) -> None:
        self.run, self.sweep, self.outside = run, run.parent, outside

    def text(self, name: str, text: str) -> None:
        (self.run / name).parent.mkdir(exist_ok=True)
        (self.run / name).write_text(text)

    def raw(self, name: str, content: bytes) -> None:
        self.text(name, "")
        (self.run / name).write_bytes(content)

    def cut(self, name: str) -> None:
        self.raw(name, (self.run / name).read_bytes()[:-20])

    def change(self, name: str, **changes: Any) -> None:
        path = self.run / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | changes))

    def replace(self, name: str, make: Callable[[Path], object]) -> None:
        path = self.run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path)

    def fifo(self, name: str) -> None:
        self.replace(name, os.mkfifo)

    def folder(self, name: str) -> None:
        self.replace(name, Path.mkdir)

    def sparse(self, name: str, size: int) -> None:
        self.text(name, "")
        os.truncate(self.run / name, size)


ROW = '{"step": 1, "attempt": 1, "time": 1.0, "train/loss": 1.0}'
DAMAGES: dict[str, Callable[[Damage], object]] = {
    "config empty": lambda d: d.text("config.yaml", ""),
    "config cut": lambda d: d.raw("config.yaml", (d.run / "config.yaml").read_bytes()[:150]),
    "config binary": lambda d: d.raw("config.yaml", bytes(range(256))),
    "config zeros": lambda d: d.raw("config.yaml", bytes(4000)),
    "config a list": lambda d: d.text("config.yaml", "- 1\n- 2\n"),
    "config gigantic": lambda d: d.sparse("config.yaml", 10 << 30),
    "config of endless digits": lambda d: d.text("config.yaml", f"steps: {'1' * 5000}\nseed: 0x{'f' * 5000}\n"),
    "config a pipe": lambda d: d.fifo("config.yaml"),
    "config a folder": lambda d: d.folder("config.yaml"),
    "config gone": lambda d: (d.run / "config.yaml").unlink(),
    "sections of wrong types": lambda d: d.text(
        "config.yaml", "steps: 4\nseed: {}\nmodel: 3\nsweep: [1]\nlaunch: x\nparallelism: [1, 2]\n"
    ),
    "overrides a list": lambda d: d.text("overrides.yaml", "- 1"),
    "overrides of wrong types": lambda d: d.text("overrides.yaml", "task: 5\nchoices: [1]"),
    "status empty": lambda d: d.text("status.json", ""),
    "status cut": lambda d: d.cut("status.json"),
    "status binary": lambda d: d.raw("status.json", b"\x80\x81\x00"),
    "status a list": lambda d: d.text("status.json", "[1]"),
    "status of another state": lambda d: d.change("status.json", state="[bold]done\x1b[2J"),
    "status with a list for the state": lambda d: d.change("status.json", state=["completed"]),
    "status with a number for the reason": lambda d: d.change("status.json", reason=7),
    "status with text for the owner": lambda d: d.change("status.json", state="running", owner="me"),
    "status of process -1": lambda d: d.change("status.json", state="running", owner={"pid": -1}),
    "status of a heartbeat without end": lambda d: d.text(
        "status.json", '{"state": "running", "owner": {"host": "x", "pid": 1}, "heartbeat": 1e999}'
    ),
    "status a pipe": lambda d: d.fifo("status.json"),
    "status a folder": lambda d: d.folder("status.json"),
    "summary a list": lambda d: d.text("summary.json", "[]"),
    "summary of wrong types": lambda d: d.change("summary.json", **{"perf/wps_median": "x", "steps": [1]}),
    "summary of huge numbers": lambda d: d.change("summary.json", **{"perf/wps_median": 10**400}),
    "summary a pipe": lambda d: d.fifo("summary.json"),
    "events binary": lambda d: d.raw("events.jsonl", b"\x00\xff\n" * 1000),
    "events with wrong figures": lambda d: d.text(
        "events.jsonl", f'{ROW}\n{{"step": 2, "attempt": 1, "train/loss": [], "perf/wps": {10**400}, "time": "x"}}\n'
    ),
    "events a pipe": lambda d: d.fifo("events.jsonl"),
    "events a folder": lambda d: d.folder("events.jsonl"),
    "events gigantic": lambda d: d.sparse("events.jsonl", 10 << 30),
    "events one gigantic line": lambda d: d.sparse("events.jsonl", 300 << 20),
    "environment a list": lambda d: d.text("environment.json", "[1]"),
    "environment of wrong types": lambda d: d.text(
        "environment.json", '{"packages": [1], "command": 3, "git_commit": {}}'
    ),
    "error with a path for the rank": lambda d: (
        d.folder("logs/rank"),
        d.text("error.json", json.dumps({"rank": "/../../../../outside/secret"})),
    ),
    "error with an object for the rank": lambda d: d.text("error.json", '{"rank": {"a": 1}}'),
    "tracker with a path for the id": lambda d: d.text("tracker.json", '{"run_id": "../../*"}'),
    "slurm with options for the job": lambda d: d.text("slurm.json", '{"job_id": "--user=me"}'),
    "slurm with a list for the job": lambda d: d.text("slurm.json", '{"job_id": [1]}'),
    "submit a list": lambda d: d.text("submit.json", "[]"),
    "log gigantic": lambda d: d.sparse("logs/rank0.log", 10 << 30),
    "logs a file": lambda d: d.replace("logs", Path.touch),
    "the run a file": lambda d: (shutil.rmtree(d.run), d.run.touch()),
    "sweep empty": lambda d: (d.sweep / "sweep.json").write_text(""),
    "sweep of wrong types": lambda d: (d.sweep / "sweep.json").write_text('{"jobs": {"a": [1]}}'),
    "sweep with wrong jobs": lambda d: (d.sweep / "sweep.json").write_text(
        json.dumps({"jobs": ["x", 5, None, {"name": [1]}, {"name": GOOD}, {"name": BAD}]})
    ),
    "sweep submitted with a list": lambda d: (d.sweep / "submit.json").write_text("[1]"),
}
HARMLESS = {
    "events binary",
    "events one gigantic line",
    "events with wrong figures",
    "log gigantic",
    "logs a file",
    "sections of wrong types",
    "summary of huge numbers",
    "sweep submitted with a list",
}
"""What keeps no one from showing the run; a figure that is none is not known."""
UNNOTICED = {"overrides a list", "overrides of wrong types"}
"""What `status` and `cancel` do not read: the options that were chosen, and all of a configuration but two numbers."""


def meshrunner(*arguments: str) -> int:
    def stop(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"{arguments} hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        return cli._dispatch(list(arguments))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two completed runs that could be executed."""
    sweep = tmp_path_factory.mktemp("placed") / "sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONUTF8", "1")
        patch.setattr(sys, "argv", ["meshrunner"])  # the sweep records its command; pytest's may contain "damaged"
        assert meshrunner("place", "-m", *TINY, "tracker=none", "seed=1,2", f"hydra.sweep.dir={sweep}") == 0
    for i, run in enumerate((sweep / GOOD, sweep / BAD)):
        like = make_run(sweep.parent / run.name, wps=1234.0 + i, summary={"steps": 4})
        for name in ("status.json", "summary.json", "events.jsonl"):
            shutil.copy(like / name, run / name)
        (run / "environment.json").write_text("{}")
        (run / "logs" / "rank0.log").write_text("the last words\n")
    return sweep


@pytest.fixture
def sweep(completed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for module in (client, submit, cancel):
        monkeypatch.setattr(module, "slurm", lambda *_, **__: "12\n")
        monkeypatch.setattr(module, "jobs", lambda _: {})
    monkeypatch.setattr(resume, "warm", lambda: None)
    monkeypatch.setattr(resume, "hold_stop_requests", lambda: None)
    monkeypatch.setattr(execute_all, "execute", lambda *_, **__: (Outcome("completed", ""), None))
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "outside"
    shutil.copytree(completed / GOOD, outside)
    (outside / "secret.log").write_text(OUTSIDE)
    for name in ("status.json", "environment.json"):
        write_json(outside / name, {"state": "completed", "reason": OUTSIDE})
    yield Path(shutil.copytree(completed, tmp_path / "sweep"))
    for path in [tmp_path / "sweep", *(tmp_path / "sweep").rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)


def tree(folder: Path) -> dict[str, tuple[float, bytes]]:
    return {str(path): (path.stat().st_mtime, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


VERBS = (
    ("status", "sweep"),
    ("ls", "sweep"),
    ("compare", "sweep"),
    ("compare", "sweep", "--json"),
    ("compare", "sweep", "--csv"),
    ("compare", "sweep", "--markdown"),
    ("compare", "sweep", "--html", "page.html"),
    ("cancel", "sweep"),
    ("submit", "sweep"),
    ("resume", "sweep"),
)


@pytest.mark.slow_cases("events one gigantic line")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_said_and_the_good_one_is_shown(
    name: str, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[name](Damage(sweep / BAD, tmp_path / "outside"))
    before = tree(tmp_path / "outside")
    capsys.readouterr()
    for arguments in VERBS:
        code = meshrunner(*arguments)
        out, err = capsys.readouterr()
        shown = f"{arguments}, exit status {code}:\n{out}\n{err}"
        assert code == 0 if arguments[0] in ("status", "compare", "ls") else code in (0, 1, 2), shown
        assert not UNPRINTABLE.search(out + err), shown
        assert OUTSIDE not in out + err and "Traceback" not in out + err, shown
        if arguments[0] == "status" or (arguments[0] == "compare" and {"--json", "--csv"} & {*arguments}):
            assert GOOD in out, shown
        if arguments[0] == "ls":  # of a run it reads but two files
            assert re.search(r"\| 1,23\d +\|", out), shown
            continue
        if arguments[0] == "compare":
            assert "1,234" in out or "1234" in out, shown
        if name not in (HARMLESS | UNNOTICED if arguments[0] in ("status", "cancel") else HARMLESS):
            assert re.search("damaged|missing", out + err), shown
    page = (tmp_path / "page.html").read_text()
    assert GOOD in page and OUTSIDE not in page
    assert (sweep / "report.html").exists() or code == 2
    assert tree(tmp_path / "outside") == before
    assert {path.name for path in tmp_path.iterdir()} == {"sweep", "outside", "page.html"}


def test_the_undamaged_sweep_has_nothing_to_say(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in VERBS:
        assert meshrunner(*arguments) == 0
        out, err = capsys.readouterr()
        assert "damaged" not in out + err


@pytest.mark.parametrize("verb", ["resume", "submit", "cancel"])
def test_what_is_good_is_executed_and_the_status_is_1(
    verb: str, sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def execute(run_dir: Path, **_: Any) -> tuple[Outcome, None]:
        done.append(run_dir.name)
        write_json(run_dir / "status.json", {"state": "completed", "reason": ""})
        return Outcome("completed", ""), None

    monkeypatch.setattr(execute_all, "execute", execute)
    write_json(sweep / GOOD / "status.json", {"state": "pending", "reason": ""})
    (sweep / BAD / "status.json").write_text("{")
    assert meshrunner(verb, "sweep") == 1
    out, err = capsys.readouterr()
    assert done == [GOOD] * (verb == "resume")
    assert ("submitted job array 12: 1 run" in out) == (verb == "submit")
    assert err.count("damaged") == 1 and f"{BAD}: status.json cannot be read" in err


REASON = "[/pytorch/third_party/gloo/x.cc:81] [enforce fail at a.cpp:9] :warning: "
STEERING = "\x1b[31m\x07 \u202eedoc\x9b2J \ud83d | a\r\nb \x7f"
KIND = "a|b\x1b[0m"


def test_text_is_neither_markup_nor_steers_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    odd = "[bold]\x1b[2J|b\\|\nc\u202e"
    make_run(tmp_path / odd, f"model.kind={json.dumps(KIND)}", state="failed", reason=REASON + STEERING)
    make_run(tmp_path / "x", environment={"packages": {"torch": "\x1b"}, "command": ["\x1b\ud83d"]})
    for arguments in (
        ("status",),
        ("ls",),
        ("ls", "--json"),
        ("compare",),
        ("compare", "--json"),
        ("compare", "--csv"),
        ("compare", "--html", "p"),
    ):
        assert meshrunner(*arguments, str(tmp_path)) == 0
        out, err = capsys.readouterr()
        assert not UNPRINTABLE.search(out + err), out + err
        for said in ("[/pytorch/third_party/gloo/x.cc:81]", "[enforce fail at a.cpp:9] :warning:"):
            assert said in out or arguments[0] == "ls", "it lists no reasons"
        if "--json" in arguments:
            assert json.loads(out)
    assert not UNPRINTABLE.search(Path("p").read_text().partition("<script")[0])
    assert meshrunner("status", str(tmp_path / odd)) == 0
    assert re.search(r"^\| \[bold\]\\x1b\[2J.*\\u202e *\| failed", capsys.readouterr().out, re.MULTILINE)
    assert meshrunner("compare", f"{tmp_path / odd}-") == 2
    assert not UNPRINTABLE.search(capsys.readouterr().err)
    assert meshrunner("\x1b[2Jstatus") == 2
    assert not UNPRINTABLE.search(capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["status", "compare"])
def test_nor_on_a_terminal(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    make_run(tmp_path / "[bold]x[#] :warning: \x1b[2J", "steps=5", f"model.kind={json.dumps(KIND)}")
    make_run(tmp_path / "y", state="failed", reason=REASON + STEERING)
    assert meshrunner(verb, str(tmp_path)) == 0
    out = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)  # rich's own
    assert plain != out and not UNPRINTABLE.search(plain)
    words = " ".join(plain.replace("|", " ").split())
    assert "[enforce fail at a.cpp:9] :warning:" in words and "\\x1b[31m" in words
    assert verb == "compare" or "[bold]x[#]" in words
    assert verb == "status" or "a|b\\x1b[0m" in plain


def test_a_cell_of_markdown_stays_one_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, kind in enumerate(("a|b", "a\\|b", "a\nb", "a\\\\|b")):
        make_run(tmp_path / f"{i}", f"data.kind={json.dumps(kind)}")
    assert meshrunner("compare", str(tmp_path), "--markdown") == 0
    head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?:\\.|[^|\\])+", row)) for row in (head, *rows)]
    assert len(rows) == 4 and len(set(cells)) == 1


def test_names_that_the_encoding_lacks(tmp_path: Path) -> None:
    make_run(tmp_path / "größe-日本")
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LANG": "C", "PYTHONUTF8": "0"}
    for verb in ("status", "compare"):
        done = subprocess.run(
            [sys.executable, "-m", "meshrunner", verb, str(tmp_path)], capture_output=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        assert rb"gr\xf6\xdfe-\u65e5\u672c" in done.stdout


def test_many_runs_of_odd_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    like = make_run(folder / "like", summary={"steps": 4})
    for i in range(300):
        shutil.copytree(like, folder / f"{i} [bold]\udcff {chr(0x1F600 + i % 50)}\n\x1b[3{i % 8}m'\"$(x)")
    assert meshrunner("status", str(folder)) == 0
    out = capsys.readouterr().out
    assert not UNPRINTABLE.search(out) and len(out.splitlines()) == 301 + 3


def test_status_has_the_figure_of_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The median over the measured steps, under one title; not the last step's."""
    make_run(tmp_path / "ended", summary={"steps": 4, "perf/wps_p10": 90.0, "perf/wps_p90": 110.0})
    going = make_run(tmp_path / "going", "steps=9", state="interrupted", losses=[5.0] * 5)
    rows = [json.loads(line) for line in (going / "events.jsonl").read_text().splitlines()]
    for row, wps in zip(rows, (1.0, 2000.0, 2100.0, 2050.0, 7.0), strict=True):
        row["perf/wps"] = wps
    (going / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(going / "summary.json", {})
    (going / "config.yaml").write_text(
        (going / "config.yaml").read_text().replace("measure_after: 0", "measure_after: 1")
    )
    assert meshrunner("status", str(tmp_path)) == 0
    status = capsys.readouterr().out
    assert meshrunner("compare", str(tmp_path)) == 0
    compared = capsys.readouterr().out
    title = "WPS per device (p10-p90)"
    for text in (status, compared):
        assert title in text
        assert re.search(r"\| 100 \(90-110\) ", text) and re.search(r"\| 2,025 \(", text), text
    assert re.search(r"ended *\| completed *\| 4/4 ", status) and re.search(r"going *\| interrupted *\| 5/9 ", status)


def test_status_of_ended_runs_reads_no_events_and_no_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "0", summary={"steps": 4})
    make_run(tmp_path / "1", state="pending", wps=None, losses=None)
    make_run(tmp_path / "2", state="skipped", wps=None, losses=None)

    def refuse(*_: object) -> None:
        raise AssertionError("it is read")

    monkeypatch.setattr("meshrunner.runner.rundir.damage.load_config", refuse)
    monkeypatch.setattr("meshrunner.runner.compare.runs.read_events", refuse)
    assert meshrunner("status", str(tmp_path)) == 0
    assert [run.state for run in read_runs([tmp_path], glance)] == ["completed", "pending", "skipped"]
    out = capsys.readouterr().out
    assert "4/4" in out and out.count("0/4") == 2

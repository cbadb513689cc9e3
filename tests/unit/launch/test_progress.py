"""Progress of slow work and of active runs, on a terminal and as plain lines."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrunner.recipes.meter import PHASES
from meshrunner.runner import console
from meshrunner.runner.console import Slow, naming
from meshrunner.runner.launch.progress import ProgressLine, run_table
from meshrunner.runner.measure import device as device_module
from meshrunner.runner.measure import meter as meter_module
from meshrunner.runner.measure.device import HostDevice
from meshrunner.runner.measure.meter import RunMeter
from meshrunner.runner.process.worker_context import Node, SharedIntegers, WorkerContext
from meshrunner.runner.rundir import StepRow
from meshrunner.runner.sweep.tally import RunLines, Tally
from tests.composed import experiment
from tests.run_dirs import make_run, write

BOUND_S = 30.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SILENT_S", 0.05)


def until_said(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Wait for a line; what was said till then."""
    said, deadline = "", time.monotonic() + BOUND_S
    while words not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
        said += capsys.readouterr().out
    return said


@pytest.mark.usefixtures("impatient")
def test_what_takes_long_is_named_once_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Slow("#3 fsdp2: ") as slow:
        for _ in range(3):
            slow.doing("saving a checkpoint")
        assert until_said("saving", capsys) == "#3 fsdp2: saving a checkpoint ...\n"
        slow.doing("saving a checkpoint")
        time.sleep(0.3)
        assert capsys.readouterr().out == ""
        slow.doing("the first step")
        assert until_said("first", capsys) == "#3 fsdp2: the first step ...\n"
    with naming("composing the configuration"):
        deadline = time.monotonic() + BOUND_S
        while not (said := capsys.readouterr()).err:
            assert time.monotonic() < deadline and not said.out
            time.sleep(0.01)  # what is written just while it is read would be lost
        assert said.err == "composing the configuration ...\n"


def test_what_is_short_is_not_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SILENT_S", 0.2)
    with Slow() as slow:
        slow.doing("the first step")
        slow.doing("")
    with naming("composing the configuration"):
        pass
    time.sleep(0.4)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_it_is_named_at_once_and_makes_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with naming("predicting") as progress:
        clock.now += 60
        progress(3, 12)
        assert capsys.readouterr().err == f"predicting ...{console.WIPE}predicting ... 3 of 12, about 3m00s left"
    assert capsys.readouterr().err == console.WIPE
    with naming("composing"):
        assert capsys.readouterr().err == "composing ..."
        console.warn("a remark")
        assert capsys.readouterr().err == f"{console.WIPE}meshrunner: a remark\n"
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError), naming("composing"):
        raise ValueError
    assert capsys.readouterr().err == f"composing ...{console.WIPE}"


def context(local_rank: int, phase: SharedIntegers) -> WorkerContext:
    steps = SharedIntegers(2)
    return WorkerContext(local_rank, local_rank, 2, Node(0, 1, "", 0, ""), "cpu", 1, 1, steps, steps, phase, None)


def test_the_first_worker_speaks_for_all() -> None:
    phase = SharedIntegers(1)
    assert PHASES[phase[0]] == "starting the workers", "until they say something"
    context(1, phase).doing("the first step")
    assert PHASES[phase[0]] == "starting the workers"
    context(0, phase).doing("saving a checkpoint")
    assert PHASES[phase[0]] == "saving a checkpoint"


def test_saving_is_named_and_so_is_a_first_step_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "peak_flops", lambda *_: (None, {}))
    said: list[str] = []
    meter: Any = RunMeter.__new__(RunMeter)
    meter.doing = said.append
    meter.context = SimpleNamespace(rank=1, records=False, emulated=False, world_size=2, threads=1, attempt=1)
    meter.profiler = SimpleNamespace(pause=lambda: None, step_begins=lambda: None, started=lambda *_: None)
    meter.pending, meter.events, meter.resumed_at, meter.tokens_before = [], None, 0, 0
    meter.device, meter.window_begin, meter.joules_before, meter.saves = HostDevice(), 0.0, 0.0, []
    meter._gather, meter.step = lambda _: None, 2
    with meter.saving():
        assert said == ["saving a checkpoint"]
    assert said == ["saving a checkpoint", ""]
    for compiles, phase in ((True, "compiling during the first step"), (False, "the first step")):
        meter.experiment = experiment(f"compile={'per_block' if compiles else 'eager'}")
        meter.started(device=torch.device("cpu"), params=1, describe_data=dict)
        assert said[-1] == phase


def test_measuring_the_peak_is_named_only_where_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path))
    monkeypatch.setattr(device_module, "_measure", lambda _: 5e9)
    said: list[str] = []
    me: Any = SimpleNamespace(threads=1, doing=said.append)
    assert [device_module._cached_peak("fp32", me) for _ in range(2)] == [5e9, 5e9]
    assert said == ["measuring the peak FLOP/s of this CPU"]


def row(step: int) -> StepRow:
    figures = {
        "step": step,
        "perf/step_time_s": 1.0,
        "train/loss": 3.0,
        "train/grad_norm": 1.0,
        "perf/wps": 100.0,
        "perf/mfu": None,
        "memory/peak_rss_gib": 0.5,
    }
    return StepRow(figures)


@pytest.mark.usefixtures("impatient")
def test_a_piped_run_has_a_line_for_what_takes_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(2, tmp_path) as progress:
        progress.show([], "compiling during the first step")
        said = until_said("compiling", capsys)
        progress.show([row(1)], "")
        progress.show([row(2)], "saving a checkpoint")
        said += until_said("saving", capsys)
    assert [line.split("  ")[0] for line in said.splitlines()] == [
        "compiling during the first step ...",
        "step 1/2",
        "step 2/2",
        "saving a checkpoint ...",
    ]


NAMES = ("#3 fsdp2 full", "#12 fsdp2 selective_op micro_batch=4 repeat=2")
CELLS = ("interrupted", "12000/12000", "123,456", "32.14 GiB (33.82%)", "10h02m")


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_the_name_yields_and_state_step_and_time_left_do_not(width: int) -> None:
    from rich.console import Console

    titles = ("run", "state", "step", "last WPS", "memory", "left")
    screen = Console(width=width, file=io.StringIO())
    with screen.capture() as capture:
        screen.print(run_table(titles, [[name, *CELLS] for name in NAMES], width))
    head, _, *rows = [line.rstrip() for line in capture.get().splitlines()]
    assert len(rows) == 2 and max(map(len, (head, *rows))) <= width
    for name, line in zip(NAMES, rows, strict=True):
        assert all(cell in line for cell in (CELLS[0], CELLS[1], CELLS[4])), line
        assert line[:3] == name[:3] and ((CELLS[3] in line) == (width == 120))
        assert ("32.14 GiB" in line) == (width >= 80), "memory is short before it is left out"
        assert name in line or "…" in line
    assert (NAMES[1] in rows[1]) == (width == 120)


def sweep(folder: Path, count: int) -> list[Path]:
    jobs = [{"name": f"{i:03}_x", "overrides": [f"steps={i}"]} for i in range(count)]
    (folder / "sweep").mkdir()
    write(folder / "sweep" / "sweep.json", {"jobs": jobs})
    return [folder / "sweep" / str(job["name"]) for job in jobs]


def test_what_a_sweep_has_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("meshrunner.runner.sweep.tally.time.monotonic", lambda: clock.now)
    first, *rest = runs = sweep(tmp_path, 4)
    make_run(first, wps=100.0)
    tally = Tally(runs, rest)
    assert tally.line == "1/4 done, best so far: #0 steps=0 100 WPS per device", "nothing to judge the rest by"
    for run_dir, wps, state in zip(rest[:2], (300.0, 900.0), ("completed", "oom"), strict=True):
        clock.now += 60
        tally.ended(make_run(run_dir, wps=wps, state=state))
    assert tally.line == "3/4 done, about 1m00s left, best so far: #1 steps=1 300 WPS per device"
    clock.now += 50
    assert tally.left == "about 10s left"
    clock.now += 5000
    assert tally.left == "about 1s left"
    tally.ended(make_run(rest[2], state="failed"))
    assert tally.line == "4/4 done, best so far: #1 steps=1 300 WPS per device"


@pytest.mark.usefixtures("impatient")
def test_piped_remarks_say_whose_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = sweep(tmp_path, 2)
    with RunLines(runs, runs, steps=False) as lines:
        assert lines.whose(runs[1]) == "#1 steps=1: "
        lines.run_started(runs[1])
        lines.refresh("loading the checkpoint")
        assert until_said("loading", capsys) == "#1 steps=1: loading the checkpoint ...\n"

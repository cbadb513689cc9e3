"""The window of profiled steps: its position, settings that do not fit, and the steps that count as measured."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.profiler.base import Session
from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.rundir.summary import summarise
from tests.composed import experiment

NOWHERE = Path("/nowhere")


class RecordingSession(Session):
    """Records the calls it receives."""

    figures = ("one",)

    def __init__(
        self, rank: int, *overrides: str, done: int = 0, folder: Path = NOWHERE, emulated: bool = False
    ) -> None:
        self.calls: list[str] = []
        chosen = experiment("profiler=trace", *overrides)
        context = SimpleNamespace(rank=rank, emulated=emulated)
        super().__init__(chosen.profiler, chosen.profiled, folder, context)  # type: ignore[arg-type]
        self.started(torch.device("cpu"), done)
        for step in range(done + 1, chosen.steps + 1):
            self.step_begins()
            figures = self.step_done(step)
            if figures is not None:
                self.calls.append(f"{figures} after {step}")

    def begin(self) -> None:
        self.calls.append(f"begin {self.next_step}")

    def step_begins(self) -> None:
        if self.recording:
            self.calls.append(f"step {self.next_step}")

    def pause(self) -> None:
        if self.recording:
            self.calls.append("pause")

    def end(self) -> list[float]:
        return [1.0]


class WarmedSession(RecordingSession):
    """A session with a warm-up."""

    warms_up = True

    def warm_up(self) -> None:
        self.calls.append(f"warm up {self.next_step}")


@pytest.mark.parametrize(
    ("overrides", "done", "first", "last"),
    [
        ((), 0, 5, 7),
        (("measure_after=0", "profiler.start=0", "profiler.steps=1"), 0, 1, 1),
        (("profiler.start=24",), 0, 28, 30),
        ((), 10, 15, 17),
    ],
)
def test_window_covers_the_configured_steps(
    overrides: tuple[str, ...], done: int, first: int, last: int, tmp_path: Path
) -> None:
    steps = [call for step in range(first, last + 1) for call in (f"step {step}", "pause")]
    expected = [f"begin {first}", *steps, f"[1.0] after {last}"]
    assert RecordingSession(0, *overrides, done=done, folder=tmp_path).calls == expected
    warm_up = [f"warm up {first - 1}", f"step {first - 1}", "pause"] if first > 1 else []
    assert WarmedSession(0, *overrides, done=done, folder=tmp_path).calls == warm_up + expected


def test_turns_after_names_the_steps_where_profiling_begins_and_ends(tmp_path: Path) -> None:
    chosen = experiment("profiler=trace")
    for session, expected in ((RecordingSession, [4, 7]), (WarmedSession, [3, 4, 7])):
        turning = session(0, folder=tmp_path)
        assert [step for step in range(1, chosen.steps + 1) if turning.turns_after(step)] == expected


def test_unprofiled_rank_has_the_same_window_and_no_figures(tmp_path: Path) -> None:
    calls = RecordingSession(1, folder=tmp_path).calls
    assert calls == ["step 5", "pause", "step 6", "pause", "step 7", "pause", f"{[math.nan]} after 7"], (
        "its rows are slowed, too"
    )
    assert RecordingSession(1, "profiler.ranks=all", folder=tmp_path).calls[-1] == "[1.0] after 7"
    assert RecordingSession(1, folder=tmp_path, emulated=True).calls[-1] == "[1.0] after 7"


def test_resumed_run_without_room_for_the_window_warns() -> None:
    chosen = experiment("profiler=trace")
    assert chosen.profiler.remarks(chosen.profiled, "cpu", done=23) == []
    (remark,) = chosen.profiler.remarks(chosen.profiled, "cpu", done=24)
    assert "24 completed steps + measure_after(3) + profiler.start(1) + profiler.steps(3) = 31" in remark
    resumed = RecordingSession(0, done=24)
    assert resumed.calls == [] and not any(resumed.turns_after(step) for step in range(25, 31))


@pytest.mark.parametrize("option", ["trace", "memory"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=6", "measure_after(3) + profiler.start(1) + profiler.steps(3) = 7 is more than steps(6)"),
        ("profiler.ranks=[0,4,5]", "profiler.ranks: no such rank: 4, 5; the 4 ranks are 0 to 3"),
    ],
)
def test_settings_that_do_not_fit_show_their_arithmetic(option: str, override: str, expected: str) -> None:
    fit(experiment(f"profiler={option}", "steps=7", "launch.nodes=2", "profiler.ranks=[0,3]"), 2)
    with pytest.raises(Incompatible) as caught:
        fit(experiment(f"profiler={option}", "launch.nodes=2", override), 2)
    assert expected in str(caught.value)


@pytest.mark.parametrize("ranks", ["[]", "[-1]", "[0,0]", "some", "1", "[true]", "[1.5]"])
def test_wrong_list_of_ranks_is_refused(ranks: str) -> None:
    with pytest.raises(ConfigError, match=r"profiler\.ranks: expected 'all' or a list of distinct ranks"):
        experiment("profiler=trace", f"profiler.ranks={ranks}")


def test_profiled_steps_do_not_count_towards_throughput() -> None:
    rows = [StepRow({"step": step, "attempt": 1, "time": 0.0, "perf/wps": 100.0}) for step in range(1, 8)]
    for row in rows[3:6]:
        row.update({"profiled": True, "perf/wps": 1.0})
    found = summarise(rows, measure_after=2, started=0.0, attempt=1)
    assert (found.figures["perf/wps_p10"], found.figures["perf/wps_median"], found.steps) == (100.0, 100.0, 7)
    assert summarise(rows[:6], measure_after=3, started=0.0, attempt=1).figures["perf/wps_median"] is None


@pytest.mark.slow
def test_no_profiler_is_imported_without_one() -> None:
    program = (
        "import sys; from tests.composed import experiment; from pathlib import Path; from types import SimpleNamespace; "
        "chosen, rank = experiment(), SimpleNamespace(rank=0, emulated=False); "
        "session = chosen.profiler.session(chosen.profiled, Path('.'), rank); "
        "import meshrunner.runner.measure.meter; "
        "assert not session.recording and session.step_done(1) is None; "
        "names = ('profiler.trace', 'profiler.memory', 'profiler.step_lines', 'ledger.memory_ledger', 'ledger.phases'); "
        "found = {'meshrunner.runner.' + name for name in names} & set(sys.modules); "
        "assert not found, found"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert ended.returncode == 0, ended.stderr

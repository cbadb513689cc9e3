"""The report page of a running sweep: when it is written, and that its failures are harmless."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.rundir.files import REPORT, write_json
from meshrunner.runner.sweep import execute_all, results
from meshrunner.runner.sweep.results import LEAST_S, LivePage
from tests.run_dirs import make_run


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(results, "time", clock)
    return clock


@pytest.fixture
def written(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times at which pages were written; each takes half a second."""
    moments: list[float] = []

    def write(*_: Any) -> None:
        moments.append(clock.now)
        clock.now += 0.5

    monkeypatch.setattr(results, "write_page", write)
    monkeypatch.setattr(results, "compare_sweep", lambda _: (None, None))
    monkeypatch.setattr(results, "by", lambda comparison: comparison)
    return moments


def test_page_is_written_at_most_every_ten_seconds_and_takes_one_percent(
    tmp_path: Path, clock: Clock, written: list[float]
) -> None:
    begun, page = clock.now, LivePage(tmp_path, runs=4)
    for _ in range(100):
        clock.now += 1
        page.run_ended()
    first, second, *more = written
    assert first - begun == LEAST_S, "four runs are read in no time"
    assert second - first == pytest.approx(50, abs=1) and not more, "then the page itself says how long it takes"


def test_first_page_of_many_runs_waits_for_its_share(tmp_path: Path, clock: Clock, written: list[float]) -> None:
    begun, page = clock.now, LivePage(tmp_path, runs=200)
    while not written:
        clock.now += 1
        page.run_ended()
    assert 100 < written[0] - begun < 1000


def test_unwritable_page_does_not_end_the_sweep(tmp_path: Path, clock: Clock) -> None:
    page = LivePage(tmp_path / "gone", runs=1)
    clock.now += 100
    page.run_ended()


def test_sweep_writes_its_page_between_runs(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / f"{i}", f"steps={i + 4}", state="pending", wps=None, losses=None) for i in range(3)]
    write_json(tmp_path / "sweep.json", {"jobs": [{"name": run.name, "overrides": []} for run in runs]})
    pages: list[str] = []

    def execute(run_dir: Path, **_: Any) -> Any:
        pages.append((tmp_path / REPORT).read_text() if (tmp_path / REPORT).exists() else "")
        write_json(run_dir / "status.json", {"state": "completed", "attempt": 1, "started": 1.0})
        clock.now += 60
        return Outcome("completed", ""), None

    monkeypatch.setattr(execute_all, "execute", execute)
    monkeypatch.setattr(execute_all, "report", lambda *_, **__: None)
    display: Any = SimpleNamespace(steps=False, refresh=None, run_started=lambda _: None, run_ended=lambda _: None)
    settings: Any = SimpleNamespace(retry=0, fail_fast=False, rerun=[])
    preemption: Any = SimpleNamespace(poll=lambda: None, requested=False)
    page = LivePage(tmp_path, len(runs))
    execute_all._sequential(runs, settings, display, page, preemption)
    assert [("1 completed" in text, "2 completed" in text) for text in pages] == [
        (False,) * 2,
        (True, False),
        (False, True),
    ]
    assert "the page is updated until all runs have ended" in pages[1]
    assert "page is updated" not in (tmp_path / REPORT).read_text()

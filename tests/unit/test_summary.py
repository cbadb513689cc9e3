"""Rows -> summary, and the arithmetic of a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrunner.runner.launch.report import row_cells
from meshrunner.runner.rundir.events import Tail, read_events
from meshrunner.runner.rundir.summary import summarise


def row(step: int, attempt: int = 1, wps: float = 100.0, time: float = 0.0) -> dict[str, object]:
    return {"step": step, "attempt": attempt, "time": time, "perf/wps": wps, "train/loss": 1.0 / step}


def test_the_first_steps_do_not_count() -> None:
    rows = [row(step, wps=1.0 if step <= 3 else 100.0 + step, time=10.0 + step) for step in range(1, 14)]
    found = summarise(rows, measure_after=3, started=5.0, attempt=1)
    assert found["perf/wps_median"] == 108.5
    assert found["perf/wps_p10"] == pytest.approx(104.9) and found["perf/wps_p90"] == pytest.approx(112.1)
    assert found["perf/time_to_first_step_s"] == 6.0
    assert found["train/final_loss"] == pytest.approx(1 / 13)
    assert found["perf/mfu_median"] is None, "what is not known is null"


def test_nothing_measured_is_null() -> None:
    for rows in ([], [row(1), row(2)]):
        found = summarise(rows, measure_after=3, started=0.0, attempt=1)
        assert found["perf/wps_median"] is None and found["perf/wps_p10"] is None
    assert row_cells({"state": "failed"})["WPS per device (p10-p90)"] == "-"


def test_one_measured_step_is_its_own_range() -> None:
    found = summarise([row(1), row(2), row(3), row(4, wps=7.0)], measure_after=3, started=0.0, attempt=1)
    assert (found["perf/wps_median"], found["perf/wps_p10"], found["perf/wps_p90"]) == (7.0, 7.0, 7.0)


def test_the_first_steps_after_a_checkpoint_do_not_count_either() -> None:
    slow = (1, 2, 11, 12)
    rows = [row(step, attempt=1 + (step > 10), wps=1.0 if step in slow else 50.0) for step in range(1, 21)]
    found = summarise(rows, measure_after=2, started=0.0, attempt=2)
    assert (found["perf/wps_p10"], found["perf/wps_median"], found["steps"]) == (50.0, 50.0, 20)


def test_the_time_to_the_first_step_is_that_of_the_last_attempt() -> None:
    rows = [row(1, attempt=1, time=1.0), row(2, attempt=2, time=107.0)]
    assert summarise(rows, 0, started=100.0, attempt=2)["perf/time_to_first_step_s"] == 7.0
    assert summarise(rows, 0, started=100.0, attempt=3)["perf/time_to_first_step_s"] is None


def test_a_reader_takes_the_last_row_of_a_step_and_survives_damage(tmp_path: Path) -> None:
    lines = [
        json.dumps(row(1)),
        json.dumps(row(2)),
        "{garbage",
        "[]",
        json.dumps(row(2, attempt=2)),
        json.dumps(row(3))[:20],
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    rows = read_events(tmp_path)
    assert [(r["step"], r["attempt"]) for r in rows] == [(1, 1), (2, 2)], (
        "the half-written last line does not count yet"
    )


def test_a_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    text = json.dumps(row(1))
    path.write_text(text[:10])
    assert tail.read() == []
    with path.open("a") as file:
        file.write(text[10:] + "\n")
    assert [r["step"] for r in tail.read()] == [1]
    assert tail.read() == []

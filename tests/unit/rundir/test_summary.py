"""Rows -> summary, and the arithmetic of a row."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from meshrunner.runner.compare.cells import layout_remarks
from meshrunner.runner.launch.report import row_cells
from meshrunner.runner.rundir.events import StepRow, Tail, read_events
from meshrunner.runner.rundir.files import LAYOUTS
from meshrunner.runner.rundir.states import Status
from meshrunner.runner.rundir.summary import Layouts, Summary, add_layout, relative_error, summarise, write_summary


def row(step: int, attempt: int = 1, wps: float = 100.0, time: float = 0.0) -> StepRow:
    return StepRow({"step": step, "attempt": attempt, "time": time, "perf/wps": wps, "train/loss": 1.0 / step})


def test_the_first_steps_do_not_count() -> None:
    rows = [row(step, wps=1.0 if step <= 3 else 100.0 + step, time=10.0 + step) for step in range(1, 14)]
    found = summarise(rows, measure_after=3, started=5.0, attempt=1)
    assert found.figures["perf/wps_median"] == 108.5 and found.measured_steps == 10
    assert found.figures["perf/wps_p10"] == pytest.approx(104.9)
    assert found.figures["perf/wps_p90"] == pytest.approx(112.1)
    assert found.figures["perf/time_to_first_step_s"] == 6.0
    assert found.figures["train/final_loss"] == pytest.approx(1 / 13)
    assert found.figures["perf/mfu_median"] is None, "what is not known is null"


def test_nothing_measured_is_null() -> None:
    for rows in ([], [row(1), row(2)]):
        found = summarise(rows, measure_after=3, started=0.0, attempt=1).figures
        assert found["perf/wps_median"] is None and found["perf/wps_p10"] is None
    assert row_cells(Summary(state="failed"))["WPS per device (p10-p90)"] == "-"


def test_one_measured_step_is_its_own_range() -> None:
    found = summarise([row(1), row(2), row(3), row(4, wps=7.0)], measure_after=3, started=0.0, attempt=1).figures
    assert (found["perf/wps_median"], found["perf/wps_p10"], found["perf/wps_p90"]) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize(("steps", "correlation"), [(12, 0.0), (80, 0.0), (80, 0.5), (400, 0.8)])
def test_the_error_of_a_median_is_that_of_many_runs(steps: int, correlation: float) -> None:
    """The error from one run's steps, with a trend and an outlier besides, against the scatter of the medians of 600 runs."""
    generator, medians, errors = random.Random(steps), [], []
    for _ in range(600):
        noise, series = 0.0, []
        for _ in range(steps):
            noise = correlation * noise + generator.gauss(0, 0.02)
            series.append(noise)
        medians.append(median(series))
        slow = generator.randrange(steps)
        disturbed = [value + 0.03 * i / steps - 0.5 * (i == slow) for i, value in enumerate(series)]
        errors.append(relative_error([math.exp(value) for value in disturbed]) or 0.0)
    assert 0.75 < math.sqrt(fmean(error**2 for error in errors)) / stdev(medians) < 1.6


def test_a_step_without_a_value_leaves_the_error_of_the_others() -> None:
    speeds = [100.0, 101.0, 99.0, 103.0, 100.0, 98.0, 101.0, 100.0, 102.0]
    rows = [row(i, wps=wps) for i, wps in enumerate(speeds, 1)]
    complete = summarise(rows, 0, 0.0, 1).figures["perf/wps_error"]
    rows.insert(4, StepRow(row(10) | {"perf/wps": None}))
    assert complete and summarise(rows, 0, 0.0, 1).figures["perf/wps_error"] == complete


@pytest.mark.parametrize("values", [[], [3.0], [3.0, 0.0, 2.0]])
def test_an_unknown_error_of_a_median(values: list[float]) -> None:
    assert relative_error(values) is None


def test_the_first_steps_after_a_checkpoint_do_not_count_either() -> None:
    slow = (1, 2, 11, 12)
    rows = [row(step, attempt=1 + (step > 10), wps=1.0 if step in slow else 50.0) for step in range(1, 21)]
    found = summarise(rows, measure_after=2, started=0.0, attempt=2)
    assert (found.figures["perf/wps_p10"], found.figures["perf/wps_median"], found.steps) == (50.0, 50.0, 20)


def test_the_time_to_the_first_step_is_that_of_the_last_attempt() -> None:
    rows = [row(1, attempt=1, time=1.0), row(2, attempt=2, time=107.0)]
    assert summarise(rows, 0, started=100.0, attempt=2).figures["perf/time_to_first_step_s"] == 7.0
    assert summarise(rows, 0, started=100.0, attempt=3).figures["perf/time_to_first_step_s"] is None


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
    tail = Tail(tmp_path)
    assert tail.read() == []
    text = json.dumps(row(1))
    path.write_text(text[:10])
    assert tail.read() == []
    with path.open("a") as file:
        file.write(text[10:] + "\n")
    assert [r["step"] for r in tail.read()] == [1]
    assert tail.read() == []


def test_steps_of_an_attempt_that_was_begun_anew_are_out_of_date(tmp_path: Path) -> None:
    """Without a checkpoint the second attempt began at step 1, and was killed before it came as far as the first."""
    rows = [*(row(step) for step in range(1, 21)), *(row(step, attempt=2) for step in range(1, 4))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert [(each["step"], each["attempt"]) for each in read_events(tmp_path)] == [(1, 2), (2, 2), (3, 2)]


CONFIG = {"parallelism": {"kind": "fsdp1", "shard": 1}, "launch": {"workers": 1, "port": None}, "steps": 10, "seed": 0}


def other(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def test_figures_are_of_the_last_layout(tmp_path: Path) -> None:
    rows = [row(step, attempt=1 + (step > 10), wps=2000.0 if step <= 10 else 6000.0 + step) for step in range(1, 21)]
    add_layout(tmp_path, 1, CONFIG, {"world_size": 1})
    add_layout(tmp_path, 2, other(launch={"workers": 2, "port": 1}, steps=20), {"world_size": 2})
    found = summarise(rows, measure_after=2, started=0.0, attempt=2, layouts=Layouts.read(tmp_path / LAYOUTS).layouts)
    assert found.figures["perf/wps_median"] == 6016.5, "the first two steps after the checkpoint do not count, either"
    assert (found.figures["perf/wps_p10"] or 0) > 6000
    settings = {"launch.workers": 1, "world_size": 1}
    assert found.as_json()["earlier_layouts"] == [{"steps": (1, 10), "settings": settings}]
    assert layout_remarks(found) == [
        "steps 1 to 10 are not in the figures, because they ran with launch.workers=1, world_size=1"
    ]


def test_a_layout_under_which_no_step_was_done_does_not_count(tmp_path: Path) -> None:
    add_layout(tmp_path, 1, CONFIG, {"world_size": 1})
    add_layout(tmp_path, 2, CONFIG, {"world_size": 2})
    rows = [row(step) for step in range(1, 6)]
    found = summarise(rows, measure_after=2, started=0.0, attempt=2, layouts=Layouts.read(tmp_path / LAYOUTS).layouts)
    assert found.figures["perf/wps_median"] == 100.0 and found.earlier_layouts == []
    assert found.measured_steps == 3


def test_more_steps_and_another_tracker_are_no_other_layout(tmp_path: Path) -> None:
    add_layout(tmp_path, 1, CONFIG, {"world_size": 1})
    add_layout(tmp_path, 2, other(steps=20, tracker={"kind": "none"}), {"world_size": 1})
    assert len(Layouts.read(tmp_path / LAYOUTS).layouts) == 1


def test_a_layout_that_is_not_on_record_is_not_mixed_in(tmp_path: Path) -> None:
    """A run that an older version began."""
    add_layout(tmp_path, 2, CONFIG, {"world_size": 1})
    rows = [row(step, attempt=1 + (step > 3), wps=float(step)) for step in range(1, 8)]
    found = summarise(rows, measure_after=0, started=0.0, attempt=2, layouts=Layouts.read(tmp_path / LAYOUTS).layouts)
    assert found.figures["perf/wps_median"] == 5.5
    assert "an unrecorded layout" in layout_remarks(found)[0]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"layouts": 3}', '{"layouts": [3]}', '{"layouts": [{"attempt": []}]}']
)
def test_damaged_layouts_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "layouts.json").write_text(text)
    assert Layouts.read(tmp_path / LAYOUTS).layouts == []


@pytest.mark.parametrize("state", ["failed", "oom", "interrupted"])
def test_only_a_completed_run_has_a_final_loss(state: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, 6)))
    status = Status.model_validate({"state": state, "reason": "", "started": 0.0, "attempt": 1})
    assert write_summary(tmp_path, 0, status).figures["train/final_loss"] is None
    completed = write_summary(tmp_path, 0, status | {"state": "completed"})
    assert completed.figures["train/final_loss"] == pytest.approx(0.2)

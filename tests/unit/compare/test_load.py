"""`meshrunner.load`: runs as pandas DataFrames."""

from __future__ import annotations

import json
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest

from meshrunner import load, run
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.cells import columns
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.export import as_json
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.rundir import Status, add_layout, write_summary
from tests.run_dirs import make_run


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two repeats of FSDP1, one of FSDP2, and one that failed before its first step."""
    for number, (parallelism, wps) in enumerate([("fsdp1", 100.0), ("fsdp1", 102.0), ("fsdp2", 110.0)]):
        make_run(tmp_path / f"00{number}", f"parallelism={parallelism}", wps=wps)
    make_run(tmp_path / "003", "parallelism=fsdp2", "optimizer.betas=[0.8, 0.9]", wps=None, losses=None, state="failed")
    return tmp_path


def test_rows_are_those_of_compare(sweep: Path) -> None:
    runs = load(sweep, baseline="parallelism=fsdp1")
    assert runs.keys == ["optimizer.betas", "parallelism"]
    expected = json.loads(as_json(compare_runs(read_runs([sweep]), "parallelism=fsdp1")))
    assert list(runs.rows.columns) == list(expected[0])
    assert list(runs.rows["parallelism"]) == [row["parallelism"] for row in expected]
    assert list(runs.rows["perf/wps_median"].dropna()) == [101.0, 110.0]
    assert list(runs.rows["wps_vs_baseline_pct"].dropna()) == pytest.approx([100 * 9 / 101])
    assert set(runs.rows["optimizer.betas"]) == {"[0.9, 0.95]", "[0.8, 0.9]"}, "lists cannot be grouped by"
    assert runs.findings[0] in repr(runs)


def test_events_are_the_steps_of_every_run_with_what_varies(sweep: Path) -> None:
    events = load(sweep).events
    assert len(events) == 3 * 4
    assert list(events.columns[:4]) == ["run", "state", "parallelism", "optimizer.betas"]
    last = events[events["step"] == 4].groupby(["parallelism", "optimizer.betas"])["train/loss"].mean()
    assert dict(last) == {("fsdp1", "[0.9, 0.95]"): 3.0, ("fsdp2", "[0.9, 0.95]"): 3.0}
    assert set(events["run"]) == {str(sweep / name) for name in ("000", "001", "002")}


def test_several_folders_and_one_run(sweep: Path) -> None:
    assert len(load(sweep / "000", str(sweep / "002")).rows) == 2
    assert len(load(sweep / "000").events) == 4


def test_what_cannot_be_loaded(tmp_path: Path, sweep: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        load()
    with pytest.raises(ConfigError, match="no such directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no row has parallelism=ddp"):
        load(sweep, baseline="parallelism=ddp")


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import meshrunner; print(sorted(set(sys.modules) - before))"
    found = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert found.strip() in ("['__future__', 'meshrunner']", "['meshrunner']")


def test_loading_imports_no_torch(sweep: Path) -> None:
    program = "import sys, meshrunner; print(len(meshrunner.load(sys.argv[1]).rows), 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program, str(sweep)], text=True) == "3 False\n"


def test_the_measured_steps_are_those_of_the_medians(tmp_path: Path) -> None:
    """Two layouts, each with two steps of warm-up; then a step that compiles, and one with a profiler."""
    run_dir = make_run(tmp_path / "run", "measure_after=2", wps=None)
    rows: list[dict[str, Any]] = [
        {"step": step, "attempt": 1 + (step > 6), "perf/wps": 1000.0 / step} for step in range(1, 15)
    ]
    rows[9]["perf/compile_time_s"], rows[11]["profiled"] = 2.0, True
    (run_dir / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for attempt, workers in ((1, 1), (2, 2)):
        add_layout(run_dir, attempt, {}, {"world_size": workers})
    summary = write_summary(run_dir, 2, Status(state="completed", attempt=2, started=1.0))
    events = load(run_dir).events
    assert events["measured"].dtype == bool
    assert list(events[events["measured"]]["step"]) == [9, 11, 13, 14]
    assert events[events["measured"]]["perf/wps"].median() == summary.figures["perf/wps_median"]


def test_a_notebook_shows_the_table_of_compare_with_values_escaped(tmp_path: Path) -> None:
    for number, name in enumerate(("a<b", "<script>")):
        make_run(tmp_path / str(number), f"model.name={name}")
    shown = load(tmp_path)._repr_html_()
    for cells in zip(*(column.cells for column in columns(compare_runs(read_runs([tmp_path])))), strict=True):
        assert f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" in shown
    assert "<th>model.name</th>" in shown and "a&lt;b" in shown and "<script" not in shown
    assert "style" not in shown and "color" not in shown, "the notebook's theme sets the colours"


def test_overrides_must_be_a_list() -> None:
    with pytest.raises(ConfigError, match=r"expected a list such as \['steps=5'\], got the text 'steps=3'"):
        run("steps=3")

"""`meshrunner.load`: runs as pandas DataFrames."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshrunner import load
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.export import as_json
from meshrunner.runner.compare.runs import read_runs
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

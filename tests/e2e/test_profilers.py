"""`profiler=trace` and `profiler=memory` through the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import Ended, read, run, status

WINDOW = ("steps=7", "measure_after=1", "profiler.start=1", "profiler.steps=2")
"""Steps 3 and 4."""


pytestmark = pytest.mark.usefixtures("cache")


def profiled(folder: Path, *overrides: str, warm_up: bool) -> tuple[Ended, dict[str, Any]]:
    """A run that completes: how it ended, and its summary."""
    ended = run(*WINDOW, *overrides, cwd=folder)
    assert ended.code == 0, ended
    rows = read_events(folder / "out")
    assert [row["step"] for row in rows if row.get("profiled")] == [*[2] * warm_up, 3, 4]
    summary = read(folder / "out" / "summary.json")
    assert summary["perf/wps_median"] == median(row["perf/wps"] for row in rows[1:] if not row.get("profiled"))
    return ended, summary


@pytest.mark.slow_cases("[1]")
@pytest.mark.parametrize("ranks", ["all", "[1]"])
def test_trace(tmp_path: Path, ranks: str) -> None:
    ended, summary = profiled(
        tmp_path, "profiler=trace", f"profiler.ranks={ranks}", "checkpoint=dcp", "checkpoint.every=3", warm_up=True
    )
    expected = [0, 1] if ranks == "all" else [1]
    traces = sorted((tmp_path / "out" / "trace").glob("*.gz"))
    assert [trace.name for trace in traces] == [f"rank{rank}.json.gz" for rank in expected]
    measured = sum(row["perf/step_time_s"] for row in read_events(tmp_path / "out") if row["step"] in (3, 4))
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        assert {"aten::mm", "gloo:all_gather", "meshrunner step 3", "meshrunner step 4"} <= names
        assert not {"meshrunner step 2", "meshrunner step 5"} & names
        steps = [event["dur"] / 1e6 for event in events if event["name"].startswith("meshrunner step")]
        assert 0.5 * measured < sum(steps) < 1.5 * measured + 0.01, "saving belongs to no step"
    table = read(tmp_path / "out" / "trace" / "table.json")
    assert table["steps"] == [3, 4] and [row["rank"] for row in table["ranks"]] == expected
    for key in ("compute_pct", "exposed_comm_pct", "idle_pct"):
        figures = [row[key] for row in table["ranks"]]
        assert all(0 < figure < 100 for figure in figures), "a tiny model computes, communicates and waits for Python"
        assert summary[f"trace/{key}"] == pytest.approx(sum(figures) / len(figures))
    assert sum(summary[f"trace/{key}"] for key in ("compute_pct", "exposed_comm_pct", "idle_pct")) == pytest.approx(100)
    assert "exposed communication" in ended.out and f"{table['ranks'][0]['compute_pct']:.1f}%" in ended.out


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """FSDP2 on 2 ranks: each holds half of the optimizer's two moments, half of the parameters, or more while gathered."""
    ended, summary = profiled(tmp_path, "profiler=memory", "profiler.ranks=all", warm_up=False)
    parameters = 4 * summary["model/params"] / 2**30
    assert summary["memory/live_optimizer_gib"] == pytest.approx(parameters, rel=0.02)
    assert 0.49 < summary["memory/live_parameters_gib"] / parameters <= 1.51
    categories = [summary[key] for key in summary if key.startswith("memory/live_")]
    assert len(categories) == 8 and sum(categories) == pytest.approx(summary["memory/peak_live_gib"])
    records = [read(tmp_path / "out" / "trace" / f"memory_rank{rank}.json") for rank in (0, 1)]
    assert max(record["peak_live_bytes"] for record in records) / 2**30 == summary["memory/peak_live_gib"]
    assert "peak of live tensors" in ended.out


@pytest.mark.slow
def test_memory_that_runs_out(tmp_path: Path) -> None:
    """The window begins with the first step, and this is too much for it: 64 x 512 x 300 logits are 37 MiB."""
    window = ("profiler=memory", "profiler.start=0", "profiler.ranks=all")
    ended = run(*window, "micro_batch=64", "seq_len=512", "launch.host_memory_gib=0.1", cwd=tmp_path)
    assert ended.code == 1 and status(tmp_path / "out")["state"] == "oom", ended
    records = [read(path) for path in (tmp_path / "out" / "trace").glob("memory_rank*.json")]
    assert "memory profile: out/trace/memory_rank" in ended.out
    assert any(record["out_of_memory"] and record["by_category"]["activations"] > 2**24 for record in records)


def test_a_window_that_does_not_fit(tmp_path: Path) -> None:
    ended = run("profiler=trace", "profiler.ranks=[2]", cwd=tmp_path)
    assert ended.code == 2 and not (tmp_path / "out").exists(), ended
    assert "measure_after(0) + profiler.start(1) + profiler.steps(3) = 4 is more than steps(3)" in ended.err
    assert "no such rank: 2; the 2 ranks are 0 to 1" in ended.err

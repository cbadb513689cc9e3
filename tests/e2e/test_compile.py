"""What the record says about compilation: its time apart from the throughput, graphs, breaks, recompiles and why."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import own_classes, read, run

GRAPHS = ("compile=per_block", "compile.backend=aot_eager")


@pytest.mark.slow
def test_compile_time_is_reported_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = run(*GRAPHS, "steps=5", "measure_after=2", cwd=tmp_path)
    assert ended.code == 0 and ended.err == "", ended
    summary, rows = read(out / "summary.json"), read_events(out)
    assert summary["perf/compile_time_s"] == rows[0]["perf/compile_time_s"] > 0.1
    assert all(row["perf/compile_time_s"] == 0 for row in rows[1:])
    assert (summary["compile/graphs"], summary["compile/graph_breaks"], summary["compile/recompiles"]) == (2, {}, [])
    assert "compile/late_recompiles" not in summary


@pytest.mark.slow
def test_a_recompile_in_the_measured_window_is_said_and_does_not_count(tmp_path: Path) -> None:
    own_classes(tmp_path)
    out = tmp_path / "out"
    late = ("model.kind=faulty:Recompiles", "+model.rank=-1", "+model.step=5", "steps=7", "measure_after=2")
    ended = run(*GRAPHS, *late, cwd=tmp_path)
    assert ended.code == 0, ended
    (found,) = read(out / "summary.json")["compile/late_recompiles"]
    assert found["step"] == 5 and "eps" in found["reason"]
    assert (
        "step 5 is excluded from the measured window because torch recompiled code" in ended.err
        and found["reason"] in ended.err
    )
    measured = [row["perf/wps"] for row in read_events(out) if row["step"] in (3, 4, 6, 7)]
    assert read(out / "summary.json")["perf/wps_median"] == median(measured)


@pytest.mark.slow
def test_a_graph_break_where_none_may_be_is_an_error(tmp_path: Path) -> None:
    inside = ("wrap=rules", "wrap.rules=[{match:layers.*},{match:layers.*.feed_forward}]")
    assert run(*GRAPHS, *inside, cwd=tmp_path).code == 0
    assert sum(read(tmp_path / "out" / "summary.json")["compile/graph_breaks"].values()) > 0
    assert run(*GRAPHS, *inside, "compile.fullgraph=true", cwd=tmp_path, run_dir="strict").code == 1


@pytest.mark.slow
def test_the_second_run_compiles_from_the_cache(tmp_path: Path) -> None:
    def found(name: str) -> tuple[int, int]:
        cache = str(tmp_path / "cache")
        ended = run("compile=per_block", cwd=tmp_path, run_dir=name, MESHRUNNER_CACHE=cache)
        assert ended.code == 0, ended
        summary = read(tmp_path / name / "summary.json")
        return summary["compile/cache_hits"], summary["compile/cache_misses"]

    (no_hits, graphs), (hits, no_misses) = found("cold"), found("warm")
    assert graphs > 0 and (no_hits, no_misses) == (0, 0) and hits == graphs

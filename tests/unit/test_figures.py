"""The table of metrics is the only place that decides what is measured, summarised, shown and documented."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrunner.recipes.model.base import Flops
from meshrunner.runner import figures
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.export import as_json
from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.compare.table import markdown
from meshrunner.runner.figures import FIGURES, OVER_REPEATS, Figure, figure_of, row_keys, table_figures
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.launch.progress import ProgressLine, progress_cells
from meshrunner.runner.launch.report import report, row_cells
from meshrunner.runner.measure.device import CudaDevice, HostDevice
from meshrunner.runner.measure.rows import RANK_KEYS, Rows, Step
from meshrunner.runner.profiler.memory import KEYS
from meshrunner.runner.profiler.step_lines import Shares
from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.rundir.summary import OVER_STEPS, summarise
from tests.run_dirs import make_run

DOCS = Path(__file__).parents[2] / "docs" / "figures.md"
IDENTITY = {"step", "attempt", "time"}
"""What a row has besides figures."""


def measured_row() -> dict[str, Any]:
    """A row as the meter makes it on a CPU, of a step of a model with experts and planned buffers whose figures are all one."""
    one = torch.ones(())
    observed = dict.fromkeys((figure.key for figure in FIGURES if figure.optional), one)
    step = Step(1, one, one, 1e-3, 8, observed, 1.0, 1.0, 0.0, 0.0, False, 0.0, 1.0)
    context: Any = SimpleNamespace(attempt=1, world_size=2, device_type="cpu")
    rows = Rows(context, Flops(10, 2), peak=100.0, tokens=0)
    ones = torch.ones(2, 1, len(RANK_KEYS) + len(observed), dtype=torch.float64)
    (row,) = rows.of([step], [1.0], ones, window=1.0, times=[5.0], joules=math.nan)
    return StepRow(row | HostDevice().row({"memory/peak_rss_gib": 0.5}))


def gpu(row: StepRow) -> StepRow:
    figures = {"active_gib": 20.0, "active_pct": 25.0, "reserved_gib": 40.0, "reserved_pct": 50.0}
    return StepRow(row | {f"memory/peak_{name}": value for name, value in figures.items()})


def test_the_meter_writes_what_the_table_has_and_nothing_else() -> None:
    assert set(measured_row()) - IDENTITY == set(row_keys())
    assert set(CudaDevice.keys) < set(row_keys("memory/"))


def test_what_profilers_add_is_in_the_table() -> None:
    added = {each.key for each in FIGURES if each.over_steps == "once" and not each.predicts}
    added -= {"perf/time_to_first_step_s", "perf/wps_error", "perf/tokens_per_cpu_s_error", "pipeline/idle_pct"}
    assert added == {KEYS[0], "pipeline/measured_idle_pct", *(f"trace/{name}" for name in Shares._fields)}


def test_saving_has_a_column_where_something_was_saved() -> None:
    figure = figure_of("perf/checkpoint_time_s")
    summary = summarise([measured_row()], 0, 0.0, 1)
    assert figure.heading not in row_cells(summary)
    assert row_cells(summary | {"perf/checkpoint_time_s": 1.5})["checkpoint"] == "1.500 s"


def test_the_documentation_is_what_the_table_says() -> None:
    text = DOCS.read_text().partition("<!-- begin: python -m meshrunner.runner.figures -->\n")[2]
    assert text.partition("<!-- end -->")[0].splitlines() == list(figures.documentation())


def test_the_table_is_sound() -> None:
    keys = [figure.key for figure in FIGURES]
    assert len(set(keys)) == len(keys)
    in_summary = [key for figure in FIGURES for key in figure.summary_keys]
    assert len(set(in_summary)) == len(in_summary)
    titles = [figure.heading for figure in table_figures()]
    assert len(set(titles)) == len(titles)
    for figure in FIGURES:
        assert set(figure.over_steps.split()) <= {*OVER_STEPS, "saves", "once"}
        assert set(figure.over_repeats.split()) <= set(OVER_REPEATS)
        for other in (figure.beside, figure.unless):
            assert not other or figure_of(other).over_repeats, f"{figure.key}: {other} would be shown, so it is merged"


POWER = Figure("perf/power_w", "W", "power", "{:.0f} W".format, "median", "max", "of the device")


def test_a_metric_more_is_a_line_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "FIGURES", (*FIGURES, POWER))
    figures_of = [{"perf/wps": 1.0, "perf/power_w": 100.0 * i} for i in (1, 2, 3, 4)]
    rows = [StepRow({"step": i, "attempt": 1, "time": 1.0} | each) for i, each in enumerate(figures_of, 1)]
    summary = summarise(rows, 1, 0.0, 1)
    assert summary.figures["perf/power_w_median"] == 300.0 and summary.figures["perf/wps_median"] == 1.0
    assert row_cells(summary)["power"] == "300 W"
    for i, name in enumerate(("a", "b")):
        make_run(tmp_path / name, f"seed={i}", summary={"perf/power_w_median": 300.0 + i})
    comparison = compare_runs(read_runs([tmp_path]))
    head, _, row, *_ = (line.split("|") for line in markdown(comparison).splitlines())
    assert row[[title.strip() for title in head].index("power")].strip() == "301 W"
    assert json.loads(as_json(comparison))[0]["perf/power_w_median"] == 301.0
    assert list(figures.documentation())[-1].startswith("| `perf/power_w` | `perf/power_w_median` | W | power | max |")


def test_the_keys_of_json_and_csv_stay() -> None:
    assert list(figures.merged([])) == [
        *("perf/wps_median", "perf/wps_p10", "perf/wps_p90", "plan/perf/wps", "perf/tokens_per_cpu_s_median"),
        "perf/joules_per_token_median",
        *("perf/mfu_median", "memory/peak_active_gib", "memory/peak_active_pct", "plan/memory/peak_active_gib"),
        *("memory/peak_reserved_gib", "memory/peak_reserved_pct"),
        *("memory/peak_rss_gib", "perf/step_time_s_median", "perf/compute_step_time_s_median"),
        *("perf/communication_s_median", "perf/checkpoint_time_s", "perf/time_to_first_step_s"),
        *("train/final_loss", "eval/loss", "eval/best_loss"),
        "experts/max_violation_median",
        "pipeline/idle_pct",
        "pipeline/measured_idle_pct",
    ]


def test_a_metric_without_a_column_is_in_the_summary_alone() -> None:
    row = gpu(measured_row())
    summary = summarise([row], 0, 0.0, 1).figures
    for key in ("perf/tflops_median", "perf/cpu_time_s_median", "memory/alloc_retries", "perf/compile_time_s"):
        assert key in summary and key not in figures.merged([summary])
    assert not {"train/lr", "train/tokens", "train/grad_norm"} & set(summary)


def test_host_memory_is_shown_where_the_device_has_none() -> None:
    on_cpu, on_gpu = (row_cells(summarise([row], 0, 0.0, 1)) for row in (measured_row(), gpu(measured_row())))
    assert on_cpu["peak RSS"] == "0.50 GiB" and "peak active" not in on_cpu and "peak reserved" not in on_cpu
    assert on_gpu["peak active"] == "20.00 GiB (25.00%)" and "peak RSS" not in on_gpu


def test_the_progress_line_has_the_titles_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in (measured_row(), gpu(measured_row()) | {"perf/mfu": None}):
        ProgressLine(1, tmp_path).show([StepRow(row)])
    cpu_line, gpu_line = capsys.readouterr().out.splitlines()
    assert cpu_line == "step 1/1  loss 1.0000  grad norm 1.000  4 WPS  MFU 40.0%  0.50 GiB host  done"
    assert "4 WPS  MFU unknown  40.00 GiB (50.00%)" in gpu_line
    assert progress_cells("completed", 1, [measured_row()]) == ("1/1", "4", "0.50 GiB host", "-")


def test_a_run_of_which_nothing_was_measured_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = summarise([measured_row()], 3, 1.0, 1) | {"state": "completed"}
    found = summary.figures
    assert found["perf/wps_median"] is found["perf/wps_p10"] is found["perf/mfu_median"] is None
    for i in range(2):
        make_run(tmp_path / f"{i}", f"steps={i + 1}", wps=None, losses=[4.0] * (i + 1), summary=summary.as_json())
    comparison = compare_runs(read_runs([tmp_path]), "steps=1")
    assert [against and against.speed.percent for against in comparison.against] == [None, None]
    assert "WPS" not in markdown(comparison) and "| 1.0000     |" in markdown(comparison)
    write_page(comparison, tmp_path / "page.html")
    report(tmp_path / "0", Outcome("completed", ""), summary)
    _, *table, _ = capsys.readouterr().out.splitlines()
    head, _, row = ([cell.strip() for cell in line.split("|")] for line in table)
    cells = dict(zip(head, row, strict=True))
    assert [cells[title] for title in ("WPS per device (p10-p90)", "MFU", "step time")] == ["-"] * 3
    assert (cells["time to first step"], cells["peak RSS"], cells["final loss"]) == ("4.0 s", "0.50 GiB", "1.0000")


def test_a_prediction_has_its_error_beside_it() -> None:
    figure, summary = figure_of("plan/memory/peak_active_gib"), {"plan/memory/peak_active_gib": 20.62}
    assert figure.cell([summary | {"memory/peak_active_gib": 20.0}]) == "20.62 GiB (+3.1%)"
    assert figure.cell([summary | {"memory/peak_active_gib": None}]) == figure.cell([summary]) == "20.62 GiB"
    assert figure.cell([{"memory/peak_active_gib": 20.0}]) == ""


def test_a_cold_start_counts_only_where_it_is_alone() -> None:
    figure = figures.figure_of("perf/time_to_first_step_s")
    cold, warm = ({"perf/time_to_first_step_s": seconds, "cold": seconds == 9.0} for seconds in (9.0, 2.0))
    assert figure.cell([cold]) == "9.0 s (cold)"
    assert figure.cell([cold, warm, warm | {"perf/time_to_first_step_s": 3.0}]) == "2.5 s"
    assert figure.cell([warm]) == "2.0 s"

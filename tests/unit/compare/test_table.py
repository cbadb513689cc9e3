"""The output of `compare`: the table of a pull request, at any width, and its raw figures."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.cells import columns, facts, reasons, row_label
from meshrunner.runner.compare.comparison import Comparison, compare_runs
from meshrunner.runner.compare.export import as_csv, as_json
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.compare.table import markdown, parts
from meshrunner.runner.compare.text_table import BETWEEN, narrowest
from meshrunner.runner.verbs.records.compare import compare
from tests.run_dirs import make_run, write

PR165 = """\
| activation_checkpoint | parallelism | WPS per device (p10-p90) | vs fsdp1 | MFU   | peak active        | peak reserved      | loss vs fsdp1   |
|-----------------------|-------------|--------------------------|----------|-------|--------------------|--------------------|-----------------|
| full                  | fsdp1       | 6,150 (6,100-6,200)      |          | 26.7% | 23.58 GiB (24.81%) | 32.14 GiB (33.82%) |                 |
| full                  | fsdp2       | 6,200 (6,100-6,300)      | +0.8% ~  | 26.9% | 22.73 GiB (23.92%) | 31.02 GiB (32.64%) | agrees (3.1e-3) |
| selective_op          | fsdp1       | 6,600 (6,500-6,700)      |          | 28.6% | 50.35 GiB (52.98%) | 63.90 GiB (67.23%) |                 |
| selective_op          | fsdp2       | 6,700 (6,600-6,800)      | +1.5% ~  | 29.0% | 49.54 GiB (52.13%) | 59.41 GiB (62.51%) | agrees (2.8e-3) |

- ~ within noise"""  # noqa: E501
"""Figures of torchtitan's pull request 165."""

MEASURED: dict[str, tuple[Any, ...]] = {
    "full fsdp1": ((6120, 6150, 6180), 6100, 6200, 26.7, 23.58, 24.81, 32.14, 33.82, 0.0),
    "full fsdp2": ((6150, 6200, 6250), 6100, 6300, 26.9, 22.73, 23.92, 31.02, 32.64, 3.1e-3),
    "selective_op fsdp1": ((6540, 6600, 6660), 6500, 6700, 28.6, 50.35, 52.98, 63.90, 67.23, 0.0),
    "selective_op fsdp2": ((6640, 6700, 6760), 6600, 6800, 29.0, 49.54, 52.13, 59.41, 62.51, 2.8e-3),
}


def pr165(folder: Path, repeats: int = 3) -> Path:
    """A sweep of four combinations, each repeated."""
    for name, (wps, p10, p90, mfu, active, active_pct, reserved, reserved_pct, apart) in MEASURED.items():
        ac, layout = name.split()
        for i in range(repeats):
            figures = {
                "perf/wps_p10": p10,
                "perf/wps_p90": p90,
                "perf/mfu_median": mfu,
                "memory/peak_active_gib": active,
                "memory/peak_active_pct": active_pct,
                "memory/peak_reserved_gib": reserved,
                "memory/peak_reserved_pct": reserved_pct,
                "memory/peak_rss_gib": 9.5,
            }
            make_run(
                folder / f"{i}-{name.replace(' ', '-')}",
                f"activation_checkpoint={ac}",
                f"parallelism={layout}",
                "precision=bf16",
                wps=wps[i],
                losses=(6.0, 5.0 * (1 + apart), 4.0),
                summary=figures,
            )
    return folder


def of(folder: Path, baseline: str | None = None) -> Comparison:
    return compare_runs(read_runs([folder]), baseline)


def test_the_table_of_a_pull_request(tmp_path: Path) -> None:
    text = markdown(of(pr165(tmp_path), "parallelism=fsdp1"))
    assert PR165 in text
    table, _, below = text[text.index(PR165) :].partition("- ~ within noise")
    assert (
        "at the 5% level, Holm-corrected for the whole table" in below
        and "% and more would have shown" in below
        and "of several runs" in below
    )
    assert len({len(line) for line in table.strip().splitlines()}) == 1


def test_every_line_below_the_table_is_rendered_by_itself(tmp_path: Path) -> None:
    """Markdown joins lines that follow each other to a paragraph, unless each is an entry of a list."""
    make_run(tmp_path / "0", "parallelism=fsdp1", environment={"packages": {"torch": "2.11.0"}})
    make_run(tmp_path / "1", "parallelism=fsdp2", environment={"packages": {"torch": "2.13.0"}})
    make_run(tmp_path / "2", "parallelism=fsdp2", "steps=5", state="failed", reason="rank 0 raised")
    *_, below = markdown(of(pr165(tmp_path, repeats=2), "parallelism=fsdp1")).split("|\n\n")
    lines = below.splitlines()
    assert len(lines) > 5 and all(line.startswith("- ") for line in lines), below


def test_a_speed_of_two_steps_is_remarked_on(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "steps=5", "measure_after=3", summary={"measured_steps": 2})
    make_run(tmp_path / "1", "steps=30", "measure_after=3", summary={"measured_steps": 27})
    remark = "- measure_after=3 leaves 2 of 5 steps to measure, too few for a reliable speed; raise steps"
    assert markdown(of(tmp_path)).splitlines().count(remark) == 1
    make_run(tmp_path / "2", "steps=3", "measure_after=3", wps=None, summary={"measured_steps": 0})
    assert "- measure_after=3 leaves none of 3 steps" in markdown(of(tmp_path))
    assert "measure_after" not in markdown(of(tmp_path / "1"))


def test_losses_of_different_models_are_results(tmp_path: Path) -> None:
    make_run(tmp_path / "0", losses=(6.0, 5.0), summary={"train/final_loss": 5.0})
    make_run(tmp_path / "1", "model=llama_large", losses=(6.0, 4.0), summary={"train/final_loss": 4.0})
    remark = (
        "- losses are checked for agreement only between runs of the same model; "
        "compare losses of different models in the table"
    )
    text = markdown(of(tmp_path, "model=llama_tiny"))
    assert remark in text and "| 4.0000" in text and "differs" not in text
    assert remark not in markdown(of(tmp_path))
    assert remark not in markdown(of(pr165(tmp_path / "layouts"), "parallelism=fsdp1"))


def test_without_repeats_nothing_is_called_noise(tmp_path: Path) -> None:
    text = markdown(of(pr165(tmp_path, repeats=1), "parallelism=fsdp1"))
    assert "| +0.5% (not tested) |" in text and "~" not in text and "3 completed runs of each row" in text


def test_a_difference_beyond_noise_has_no_mark(tmp_path: Path) -> None:
    for i, wps in enumerate((100.0, 101.0, 102.0)):
        make_run(tmp_path / f"a{i}", "parallelism=fsdp1", wps=wps)
        make_run(tmp_path / f"b{i}", "parallelism=fsdp2", wps=wps + 10)
    assert "| +9.9%    |" in markdown(of(tmp_path, "parallelism=fsdp1"))


def test_the_final_losses_of_seeds_have_a_range(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / f"{seed}", f"seed={seed}", summary={"train/final_loss": 3 + seed / 10})
    assert "| 3.1000 (3.0000-3.2000) |" in markdown(of(tmp_path))
    for seed in range(3):
        make_run(tmp_path / f"x{seed}", "steps=5", summary={"train/final_loss": 3.0})
    assert "| 3.0000                 |" in markdown(of(tmp_path))


def states(folder: Path) -> Path:
    """A sweep on a CPU in which not all went well."""
    make_run(folder / "0", "steps=4", summary={"memory/peak_rss_gib": 0.5, "memory/peak_active_gib": None})
    make_run(folder / "1", "steps=5", wps=None, losses=None, state="oom", reason="rank 1: 16 GiB | wanted")
    make_run(folder / "2", "steps=6", wps=None, losses=None, state="skipped", reason="These\n  do not go together")
    make_run(folder / "3", "steps=7", wps=4.5, losses=(3.0, 2.0), state="failed", reason="rank 0 raised")
    (folder / "4").mkdir()
    (folder / "4" / "config.yaml").write_text("]")
    return folder


def test_every_row_says_its_state_and_below_why(tmp_path: Path) -> None:
    findings, *lines = markdown(of(states(tmp_path))).splitlines()
    assert findings == "1 oom: steps=5; 1 skipped: steps=6; 1 failed: steps=7; 1 damaged." and lines.pop(0) == ""
    assert [line.split("|")[2].strip() for line in lines[2:7]] == ["completed", "oom", "skipped", "failed", "damaged"]
    assert lines[3].split("|")[1:4:2] == [" 5     ", "                          "], "nothing was measured"
    assert "| 4.5 (4.5-4.5)" in lines[5] and "| 0.50 GiB |" in lines[2] and "peak active" not in lines[0]
    assert lines[8:11] == [
        "- oom: steps=5: rank 1: 16 GiB | wanted",
        "- skipped: steps=6: These do not go together",
        "- failed: steps=7: rank 0 raised",
    ]
    assert lines[11].startswith(f"- damaged: {tmp_path / '4'}: config.yaml cannot be read")


def test_the_table_leaves_out_excluded_combinations(tmp_path: Path) -> None:
    folder = tmp_path / "excluded"
    make_run(folder / "1", "steps=5", wps=None, losses=None, state="skipped", reason="sweep.exclude: steps=5")
    make_run(folder / "2", "steps=6", wps=None, losses=None, state="skipped", reason="sweep.exclude: steps=6")
    assert len(of(folder).rows) == 2, "there is nothing else to show"
    make_run(folder / "0", "steps=4")
    shown = of(folder)
    assert [run.path.name for run in shown.runs] == ["0"] and shown.keys == []
    assert "- sweep.exclude removed 2 runs from the table" in markdown(shown)


def test_a_cell_does_not_end_its_column(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "data.kind=a|b")
    make_run(tmp_path / "1", "data.kind=c")
    assert "| a\\|b " in markdown(of(tmp_path))


def test_one_run_is_named_by_its_directory(tmp_path: Path) -> None:
    assert markdown(of(make_run(tmp_path / "alone"))).splitlines()[2].startswith("| alone ")


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_a_terminal_gets_every_figure_whole(tmp_path: Path, width: int) -> None:
    table = columns(of(pr165(tmp_path), "parallelism=fsdp1"))
    found = parts(table, width, ["full fsdp1", "full fsdp2", "selective_op fsdp1", "selective_op fsdp2"], 2)
    for part in found:
        assert sum(narrowest(column) + BETWEEN for column in part) <= width
        assert len(found) == 1 or part[0].title == "#"
    assert width < 400 or found == [table]
    keys = ["activation_checkpoint", "parallelism"]
    names = keys if width == 120 else ["row"]
    for part in found if len(found) > 1 else ():
        titles = [column.title for column in part[1:]]
        assert titles[: len(names)] == names or set(titles) <= set(keys), "no figure without the name of its row"
    assert {column.title for part in found for column in part} - {"#", "row"} == {column.title for column in table}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["full fsdp2", "a_very_long_name_of_a_value_and_another_one full fsdp2"])
def test_compared_figure_and_loss_verdict_are_in_the_first_table(tmp_path: Path, width: int, name: str) -> None:
    table = columns(of(pr165(tmp_path), "parallelism=fsdp1"))
    first, *_ = parts(table, width, [name] * 4, 2)
    titles = [column.title for column in first]
    assert titles[titles.index("WPS per device (p10-p90)") :][:3] == [
        "WPS per device (p10-p90)",
        "vs fsdp1",
        "loss vs fsdp1",
    ]
    assert sum(narrowest(column) + BETWEEN for column in first) <= width
    named = "".join(column.cells[1] for column in first[1:3])
    assert named.endswith("fsdp2") or "fsdp2" in named, "a shortened name keeps its end"


def test_the_name_of_a_row_that_did_not_complete_has_its_state(tmp_path: Path) -> None:
    comparison = of(states(tmp_path))
    labels = [row_label(comparison, row) for row in comparison.rows]
    assert [label.endswith(f" ({row.state})") for label, row in zip(labels, comparison.rows, strict=True)] == [
        row.state != "completed" for row in comparison.rows
    ]


def test_json_has_a_row_per_combination_with_raw_figures(tmp_path: Path) -> None:
    rows = json.loads(as_json(of(pr165(tmp_path), "parallelism=fsdp1")))
    assert len(rows) == 4 and rows[1]["parallelism"] == "fsdp2" and len(rows[1]["runs"]) == 3
    assert rows[1]["perf/wps_median"] == 6200 and rows[1]["wps_vs_baseline_pct"] == pytest.approx(0.813, abs=1e-3)
    assert rows[1]["within_noise"] is True and 0.05 < rows[1]["p_value"] < 1
    assert rows[1]["loss_verdict"] == "agrees" and rows[1]["loss_max_relative_difference"] == pytest.approx(3.1e-3)
    assert rows[0]["loss_verdict"] is None and rows[0]["loss_why"] == "this row is a baseline"


def test_json_says_why_there_is_no_verdict(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "seq_len=16")
    make_run(tmp_path / "1", "seq_len=32")
    rows = json.loads(as_json(of(tmp_path, "seq_len=16")))
    assert (rows[1]["loss_verdict"], rows[1]["loss_why"]) == (None, "different seq_len")


def test_csv_holds_the_same(tmp_path: Path) -> None:
    comparison = of(states(tmp_path))
    rows, flat = json.loads(as_json(comparison)), list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert [row["state"] for row in flat] == [row["state"] for row in rows]
    assert flat[0]["perf/wps_median"] == "100.0" and flat[1]["perf/wps_median"] == ""
    assert flat[0]["steps"] == "4" and flat[0]["runs"] == str(tmp_path / "0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "DIR"),
        (["--jsn", "x"], "--jsn"),
        (["x", "--json", "--csv"], "not allowed with"),
        (["x"], "no such directory: x"),
    ],
)
def test_wrong_arguments_are_said(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compare(arguments)


def test_piped_it_is_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([str(states(tmp_path))]) == 0
    assert capsys.readouterr().out == markdown(of(tmp_path)) + "\n"


def test_torch_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from meshrunner.runner.verbs.records.compare import compare\n"
        "compare(sys.argv[1:]); compare([*sys.argv[1:], '--json'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'hydra', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(states(tmp_path))], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_equal_reasons_are_said_once(tmp_path: Path) -> None:
    for i in range(10):
        make_run(tmp_path / f"{i}", f"steps={i + 1}", state="oom", reason="rank 0: out of device memory", losses=None)
    lines = reasons(of(tmp_path))
    assert len(lines) == 1
    assert lines[0].startswith("oom: steps=1; steps=2; ") and lines[0].endswith(
        " and 2 more: rank 0: out of device memory"
    )


def test_models_are_compared_with_their_size(tmp_path: Path) -> None:
    for name, params in (("llama_tiny", 7_212_288), ("llama_large", 8_030_261_248)):
        make_run(tmp_path / name, f"model={name}", summary={"model/params": params})
    found = {column.title: column.cells for column in columns(of(tmp_path))}
    assert found["parameters"] == ["8.03 B", "7.21 M"]
    make_run(tmp_path / "x" / "a", "parallelism=fsdp1", summary={"model/params": 7_212_288})
    make_run(tmp_path / "x" / "b", "parallelism=fsdp2", summary={"model/params": 7_212_288})
    assert "parameters" not in [column.title for column in columns(of(tmp_path / "x"))]


def test_the_command_is_the_sweeps(tmp_path: Path) -> None:
    """Of a job, which was told to resume a directory, as of a run on this machine."""
    for name in ("a", "b"):
        make_run(tmp_path / name, environment={"command": ["meshrunner", "resume", name]})
    write(tmp_path / "sweep.json", {"command": ["meshrunner", "submit", "-m", "x=1,2"], "jobs": [{"name": "a"}]})
    assert facts(of(tmp_path))["command"] == "meshrunner submit -m x=1,2"

"""The report page's text; tests/e2e/test_page.py looks at it in a browser."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.page.charted import BINS, MAX_RANKS, POINTS
from meshrunner.runner.compare.page.write import PARTS, SCRIPTS, write_page
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.console import UNPRINTABLE
from tests.run_dirs import make_run


def page_of(folder: Path, baseline: str | None = None) -> tuple[str, dict[str, Any]]:
    """The page without its scripts, and what these are given."""
    file = folder / "page.html"
    write_page(compare_runs(read_runs([folder]), baseline), file)
    text = file.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert "<" not in data[1], "nothing ends the script element early"
    return text[: data.start()], json.loads(data[1])


def test_what_runs_say_does_not_become_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    make_run(tmp_path / "0", f"data.kind={evil}", state=evil, reason=evil, summary={"device": evil})
    run = make_run(
        tmp_path / "1<i>", environment={"command": [evil], "launch.env": {evil: evil}, "packages": {evil: evil}}
    )
    (run / "logs").mkdir()
    (run / "logs" / "rank0.log").write_text(evil + "\n")
    page, data = page_of(tmp_path)
    assert "<img" not in page and "<i>" not in page and page.count("&lt;img") > 5
    assert data["rows"][0]["name"] == evil, "text, which the scripts put into the page as text alone"


def test_the_scripts_write_text_and_never_markup() -> None:
    scripts = "".join((PARTS / f"{name}.js").read_text() for name in SCRIPTS)
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|Function|srcdoc", scripts)
    assert "require-trusted-types-for 'script'" in (PARTS / "page.html").read_text(), "and a browser sees to that"
    assert {path.stem for path in PARTS.glob("*.js")} == set(SCRIPTS)


def test_what_would_steer_a_terminal_is_shown_as_an_escape(tmp_path: Path) -> None:
    make_run(tmp_path / "0", 'parallelism.shard="a\\x1b[31m\\u202eb"')
    make_run(tmp_path / "1", state="failed\x07", reason="\x1b]0;taken over\x07")
    page, _ = page_of(tmp_path)
    assert not UNPRINTABLE.search(page)


def test_every_run_is_there_with_state_reason_command_versions_and_log(tmp_path: Path) -> None:
    make_run(tmp_path / "first", "steps=4", environment={"command": ["meshrunner", "run", "a b"]})
    run = make_run(tmp_path / "second", "steps=5", state="oom", reason="rank 2 wanted more", wps=None, losses=None)
    (run / "error.json").write_text('{"rank": 2}')
    (run / "logs").mkdir()
    (run / "logs" / "rank2.log").write_text("the last words\n")
    page, data = page_of(tmp_path)
    for said in (
        "meshrunner run &#x27;a b&#x27;",
        "<b>second</b> oom",
        "rank 2 wanted more",
        "the last words",
        'href="./first"',
        'href="./first/config.yaml"',
        'href="./second/logs/rank2.log"',
    ):
        assert said in page, said
    (column,) = (i for i, name in enumerate(data["settings"]) if name == "steps")
    assert [data["texts"][run[column]] for run in data["runs"]] == ["4", "5"], "how configurations differ"


def test_curves_are_medians_of_repeats_and_thinned_out(tmp_path: Path) -> None:
    for i in range(3):
        make_run(tmp_path / f"{i}", f"seed={i}", losses=[5.0 + i] * 5000)
    data = page_of(tmp_path)[1]
    ((axis, losses),) = (row["losses"] for row in data["rows"])
    steps = data["steps"][axis]
    assert len(steps) == len(losses) <= POINTS + 1 and (steps[0], steps[-1]) == (1, 5000)
    assert set(losses) == {6.0}


def test_a_row_knows_the_row_it_is_compared_with(tmp_path: Path) -> None:
    for i, layout in enumerate(("fsdp2", "fsdp1")):
        make_run(tmp_path / f"{i}", f"parallelism={layout}")
    assert [row["baseline"] for row in page_of(tmp_path, "parallelism=fsdp1")[1]["rows"]] == [None, 0]


def test_a_row_whose_baseline_is_left_out_is_shown_without_it(tmp_path: Path) -> None:
    for i, layout in enumerate(("fsdp1", "fsdp2")):
        make_run(tmp_path / f"{i}", f"parallelism={layout}")
    whole = compare_runs(read_runs([tmp_path]), "parallelism=fsdp1")
    write_page(replace(whole, rows=whole.rows[1:], against=whole.against[1:]), tmp_path / "page.html")
    assert '"baseline":null' in (tmp_path / "page.html").read_text()


def test_runs_without_any_figure_make_a_page_too(tmp_path: Path) -> None:
    make_run(tmp_path / "0", wps=None, losses=None, state="skipped")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.yaml").write_text("[")
    page, data = page_of(tmp_path)
    assert [row["figures"] for row in data["rows"]] == [{}, {}] and "1 skipped, 1 damaged" in page


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "0")
    for file in (tmp_path / "nowhere" / "page.html", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_page(compare_runs(read_runs([run])), file)


def test_a_run_that_broke_off_has_no_bar_and_no_final_loss(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "steps=4")
    make_run(tmp_path / "1", "steps=5", state="failed", wps=900.0, summary={"train/final_loss": 0.1})
    page, data = page_of(tmp_path)
    assert data["rows"][0]["figures"]["perf/wps"][0] == 100.0
    assert data["rows"][1]["figures"] == {} and data["rows"][1]["completed"] is False
    assert "0.1000" not in page


@pytest.mark.parametrize("name", ["javascript:alert(1)", "a&b %41#?", 'quo"te'])
def test_a_link_is_a_relative_path_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    make_run(tmp_path / name)
    page, _ = page_of(tmp_path)
    (link,) = re.findall(r'<a href="([^"]*)">directory', page)
    assert link.startswith("./") and unquote(unescape(link)) == f"./{name}"


def test_a_secret_that_an_older_version_recorded_is_not_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "0", environment={"environment": {"SLURM_JWT": "hush", "SLURM_JOB_ID": "7"}})
    page, _ = page_of(tmp_path)
    assert "SLURM_JOB_ID=7" in page and "hush" not in page


def test_a_secret_setting_is_not_among_those_that_differ(tmp_path: Path) -> None:
    for name in ("hush", "hush2"):
        make_run(tmp_path / name, f"launch.env.HF_TOKEN={name}", f"launch.env.NCCL_DEBUG={name}x")
    data = page_of(tmp_path)[1]
    assert data["settings"] == ["launch.env.NCCL_DEBUG"] and set(data["texts"]) == {"hushx", "hush2x"}


def test_step_times_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    times = [50.0, *(1.0 + 0.01 * i for i in range(2 * BINS))]
    run = make_run(tmp_path / "0", "measure_after=1", losses=[5.0] * len(times), times=times)
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rows[4]["perf/compile_time_s"], rows[4]["perf/step_time_s"] = 30.0, 31.0
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = page_of(tmp_path)[1]
    (row,) = data["rows"]
    axis, seconds = row["times"]
    assert data["steps"][axis] == [2, 3, 4, *range(6, len(times) + 1)] and max(seconds) < 2
    low, high, shares = row["histogram"]
    assert (low, high) == (1.0, times[-1]) and sum(shares) == pytest.approx(1, abs=0.01) and len(shares) == BINS


def test_figures_by_rank_are_shown_and_of_many_ranks_the_extremes(tmp_path: Path) -> None:
    several = {"memory/peak_rss_gib_by_rank": [2.0, 1.0, None, 3.0], "perf/step_time_s_by_rank": {"damaged": 1}}
    make_run(tmp_path / "0", "steps=4", summary=several)
    make_run(tmp_path / "1", "steps=5", summary={"memory/peak_rss_gib_by_rank": list(range(4096))})
    make_run(tmp_path / "2", "steps=6", state="oom", summary=several)
    data = page_of(tmp_path)[1]
    one, many, none = (row["ranks"] for row in data["rows"])
    assert one == {"memory/peak_rss_gib": [[1, 1.0], [0, 2.0], [3, 3.0]]} and none == {}
    ranks = [rank for rank, _ in many["memory/peak_rss_gib"]]
    assert len(ranks) == MAX_RANKS and (ranks[0], ranks[-1]) == (0, 4095)
    assert [figure["key"] for figure in data["by_rank"]] == ["memory/peak_rss_gib"]


def test_a_row_is_named_as_in_the_sentences(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "parallelism=fsdp1", "optimizer.lr=0.1")
    make_run(tmp_path / "1", "parallelism=fsdp2", "optimizer.lr=0.2")
    page, data = page_of(tmp_path)
    assert [row["name"] for row in data["rows"]] == ["fsdp1 lr=0.1", "fsdp2 lr=0.2"]
    assert '<span class="name">fsdp1 lr=0.1</span>' in page


def test_rows_that_do_other_work_for_a_token_are_known(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "seq_len=16")
    make_run(tmp_path / "1", "seq_len=32", "parallelism=fsdp1")
    data = page_of(tmp_path)[1]
    assert data["keys"] == ["parallelism", "seq_len"] and data["workload"] == ["seq_len"]


def test_a_page_is_replaced_at_once_a_link_followed_and_a_pipe_kept(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "0")
    comparison = compare_runs(read_runs([tmp_path / "sweep"]))
    page, link, pipe = (tmp_path / name for name in ("page.html", "link.html", "pipe"))
    page.write_text("old")
    with page.open() as reader:
        write_page(comparison, page)
        assert reader.read() == "old", "who reads the old page reads all of it"
    link.symlink_to(page)
    page.write_text("old")
    write_page(comparison, link)
    assert link.is_symlink() and page.stat().st_size > 10_000
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_page, args=(comparison, pipe), daemon=True)
    writer.start()
    assert pipe.read_text().startswith("<!DOCTYPE html>")
    writer.join()
    assert {path.name for path in tmp_path.iterdir()} == {"sweep", "page.html", "link.html", "pipe"}

"""The report page's text; tests/e2e/test_compare.py looks at it in a browser."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.page.write import POINTS, write_page
from meshrunner.runner.compare.rows import compare_runs
from meshrunner.runner.compare.runs import read_runs
from tests.run_dirs import make_run


def page_of(folder: Path, baseline: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """The page without plotly, and what the charts are drawn from."""
    file = folder / "page.html"
    write_page(compare_runs(read_runs([folder]), baseline), file)
    text = file.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return text[: data.start()], json.loads(data[1])["rows"]


def test_what_runs_say_does_not_become_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    make_run(tmp_path / "0", f"data.kind={evil}", state=evil, reason=evil, summary={"device": evil})
    run = make_run(
        tmp_path / "1<i>", environment={"command": [evil], "launch.env": {evil: evil}, "packages": {evil: evil}}
    )
    (run / "logs").mkdir()
    (run / "logs" / "rank0.log").write_text(evil + "\n")
    page, rows = page_of(tmp_path)
    assert "<img" not in page and "<i>" not in page and page.count("&lt;img") > 5
    assert rows[0]["name"] == "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;"


def test_every_run_is_there_with_state_reason_command_versions_and_log(tmp_path: Path) -> None:
    make_run(tmp_path / "first", "steps=4", environment={"command": ["meshrunner", "run", "a b"]})
    run = make_run(tmp_path / "second", "steps=5", state="oom", reason="rank 2 wanted more", wps=None, losses=None)
    (run / "error.json").write_text('{"rank": 2}')
    (run / "logs").mkdir()
    (run / "logs" / "rank2.log").write_text("the last words\n")
    page, _ = page_of(tmp_path)
    for said in (
        "meshrunner run &#x27;a b&#x27;",
        "<b>second</b> oom",
        "rank 2 wanted more",
        "the last words",
        'href="./first"',
    ):
        assert said in page, said
    assert "<td>steps</td><td>5</td><td>4</td>" in page, "how the configuration differs"


def test_curves_are_medians_of_repeats_and_thinned_out(tmp_path: Path) -> None:
    for i in range(3):
        make_run(tmp_path / f"{i}", f"seed={i}", losses=[5.0 + i] * 5000)
    (row,) = page_of(tmp_path)[1]
    assert len(row["steps"]) <= POINTS + 1 and (row["steps"][0], row["steps"][-1]) == (1, 5000)
    assert set(row["losses"]) == {6.0}


def test_a_row_knows_the_row_it_is_compared_with(tmp_path: Path) -> None:
    for i, layout in enumerate(("fsdp2", "fsdp1")):
        make_run(tmp_path / f"{i}", f"parallelism={layout}")
    assert [row["baseline"] for row in page_of(tmp_path, "parallelism=fsdp1")[1]] == [None, 0]


def test_runs_without_any_figure_make_a_page_too(tmp_path: Path) -> None:
    make_run(tmp_path / "0", wps=None, losses=None, state="skipped")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.yaml").write_text("[")
    page, rows = page_of(tmp_path)
    assert [row["wps"] for row in rows] == [[None] * 3] * 2 and "1 skipped, 1 damaged" in page


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "0")
    for file in (tmp_path / "nowhere" / "page.html", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_page(compare_runs(read_runs([run])), file)


def test_a_run_that_broke_off_has_no_bar_and_no_final_loss(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "steps=4")
    make_run(tmp_path / "1", "steps=5", state="failed", wps=900.0, summary={"train/final_loss": 0.1})
    page, rows = page_of(tmp_path)
    assert rows[0]["wps"][0] == 100.0
    assert rows[1]["wps"] == [None, None, None] and rows[1]["mfu"] is None
    assert "0.1000" not in page


@pytest.mark.parametrize("name", ["javascript:alert(1)", "a&b %41#?", 'quo"te'])
def test_a_link_is_a_relative_path_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    make_run(tmp_path / name)
    page, _ = page_of(tmp_path)
    (link,) = re.findall(r'<a href="([^"]*)">its folder', page)
    assert link.startswith("./") and unquote(unescape(link)) == f"./{name}"


def test_a_secret_that_an_older_version_recorded_is_not_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "0", environment={"environment": {"SLURM_JWT": "hush", "SLURM_JOB_ID": "7"}})
    page, _ = page_of(tmp_path)
    assert "SLURM_JOB_ID=7" in page and "hush" not in page

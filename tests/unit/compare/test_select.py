"""`compare --where`, `--sort` and `--top`: which rows are shown, in which order, in every form."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import Comparison, compare_runs
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.compare.select import select
from meshrunner.runner.verbs.records.compare import compare
from tests.run_dirs import make_run


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two layouts at three learning rates; one of them out of memory, though it was the fastest till then."""
    for i, layout in enumerate(("fsdp1", "fsdp2")):
        for j, lr in enumerate(("0.001", "0.003", "0.01")):
            wps = 100.0 + 100 * i + 10 * j
            failed = {"state": "oom", "reason": "rank 0: out of memory"} if (i, j) == (0, 2) else {}
            figures = {"memory/peak_rss_gib": 2.0 - wps / 1000, "perf/mfu_median": None}
            name = tmp_path / f"{i}{j}"
            make_run(
                name,
                f"parallelism={layout}",
                f"optimizer.lr={lr}",
                wps=999.0 if failed else wps,
                summary=figures,
                **failed,
            )
    return tmp_path


def of(
    sweep: Path, *where: str, sort: str | None = None, top: int | None = None, baseline: str | None = None
) -> Comparison:
    return select(compare_runs(read_runs([sweep]), baseline), where, sort, top)


def names(comparison: Comparison) -> list[str]:
    return [row.runs[0].path.name for row in comparison.rows]


@pytest.mark.parametrize(
    ("where", "left"),
    [
        (["parallelism=fsdp2"], ["10", "11", "12"]),
        (["parallelism!=fsdp2"], ["00", "01", "02"]),
        (["optimizer.lr=1e-3,0.01"], ["00", "02", "10", "12"]),
        (["lr=1e-3"], ["00", "10"]),
        (["lr < 0.01", "wps>=110"], ["01", "10", "11"]),
        (["perf/wps_median>200"], ["11", "12"]),
        (["wps>900"], []),
        (["state=oom"], ["02"]),
        (["state!=oom", "parallelism=fsdp1"], ["00", "01"]),
        (["seq_len=16", "dim>=32", "parallelism=fsdp1,fsdp2"], ["00", "01", "02", "10", "11", "12"]),
        (["mfu=null", "state=completed"], ["00", "01", "10", "11", "12"]),
        (["prefetch=0"], ["10", "11", "12"]),
    ],
)
def test_rows_that_meet_every_condition(sweep: Path, where: list[str], left: list[str]) -> None:
    if left:
        assert names(of(sweep, *where)) == left
    else:
        with pytest.raises(ConfigError, match="none of the 6 rows meets wps>900"):
            of(sweep, *where)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("paralelism=fsdp2", "there is no key 'paralelism'. Did you mean 'parallelism'?"),
        ("parallelism=fdsp2", "no run has parallelism=fdsp2. Did you mean 'fsdp2'? Known: fsdp1, fsdp2"),
        ("parallelism!=fdsp2", "no run has parallelism=fdsp2. Did you mean 'fsdp2'?"),
        ("lr=1e-4", "no run has lr=0.0001. Did you mean '0.001'? Known: 0.001, 0.003, 0.01"),
        ("wps>fast", "'wps>fast': expected a number, got 'fast'"),
        ("wps>5,000", "'wps>5,000': expected a number, got '5,000'"),
        ("parallelism>3", "'parallelism>3': parallelism is never a number; its values: fsdp1, fsdp2"),
        ("fsdp2", "expected KEY=VALUE, KEY!=VALUE or KEY>NUMBER, for example wps>5000, got 'fsdp2'"),
        ("wps>", "expected KEY=VALUE"),
        ("kind=llama", "'kind' is ambiguous: model.kind, parallelism.kind"),
        ("state=complete", "none of the 6 rows meets state=complete"),
    ],
)
def test_a_wrong_condition_is_said(sweep: Path, where: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        of(sweep, where)
    assert f"--where: {said}" in str(error.value)


def test_a_value_is_of_its_type(tmp_path: Path) -> None:
    for name, value in (("a", "true"), ("b", "1"), ("c", "'1'"), ("d", "[0.9, 0.95]")):
        make_run(tmp_path / name, f"data.kind={value}")
    assert names(of(tmp_path, "data.kind=true")) == ["a"]
    assert names(of(tmp_path, "kind=1.0")) == ["b"]
    assert names(of(tmp_path, "data.kind=[0.9, 0.95],true")) == ["a", "d"]


def test_the_best_come_first_and_what_has_no_figure_last(sweep: Path) -> None:
    assert names(of(sweep, sort="wps")) == ["12", "11", "10", "01", "00", "02"]
    assert names(of(sweep, sort="-wps")) == ["00", "01", "10", "11", "12", "02"]
    assert names(of(sweep, sort="peak_rss_gib")) == ["12", "11", "10", "01", "00", "02"], "of memory less is better"
    assert names(of(sweep, sort="-lr")) == ["02", "12", "01", "11", "00", "10"]
    assert names(of(sweep, sort="mfu")) == ["00", "01", "02", "10", "11", "12"], "nothing is known: as they were"
    with pytest.raises(ConfigError, match=r"--sort: there is no key 'wsp'\. Did you mean 'wps'"):
        of(sweep, sort="wsp")


def test_the_top_are_the_fastest_or_the_first(sweep: Path) -> None:
    assert names(of(sweep, top=2)) == ["12", "11"]
    assert names(of(sweep, sort="-wps", top=2)) == ["00", "01"]
    assert names(of(sweep, "parallelism=fsdp1", top=9)) == ["01", "00", "02"]
    with pytest.raises(ConfigError, match="--top: expected a number of at least 1, got 0"):
        of(sweep, top=0)


def test_the_verdict_is_of_the_rows_that_are_shown(sweep: Path) -> None:
    assert findings(of(sweep))[-1] == "1 oom: parallelism=fsdp1 with optimizer.lr=0.01."
    shown = findings(of(sweep, "parallelism=fsdp2", top=2))
    assert shown[-1] == "Shown: 2 of 6 rows (parallelism=fsdp2, the 2 fastest)." and not any("oom" in s for s in shown)
    assert findings(of(sweep, sort="wps", top=1))[-1] == "Shown: 1 of 6 rows (the first 1 by wps)."
    assert findings(of(sweep, sort="wps")) == findings(of(sweep))


def test_baselines_that_are_left_out_are_still_compared_with(sweep: Path) -> None:
    shown = of(sweep, "parallelism=fsdp2", sort="lr", baseline="parallelism=fsdp1")
    assert [None if each is None else each.speed.percent for each in shown.against] == [
        100.0,
        pytest.approx(90.9, abs=0.1),
        None,
    ]


def test_every_form_has_the_same_rows(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        str(sweep),
        "--where",
        "parallelism=fsdp2",
        "--where",
        "lr<0.01",
        "--sort",
        "-wps",
        "--baseline",
        "parallelism=fsdp1",
    ]
    assert compare([*given, "--json"]) == 0
    assert [row["optimizer.lr"] for row in json.loads(capsys.readouterr().out)] == [0.001, 0.003]
    assert compare([*given, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["optimizer.lr"] for row in rows] == ["0.001", "0.003"]
    assert compare([*given, "--markdown"]) == 0
    out = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| 0.0")] == ["0.001", "0.003"]
    assert "Shown: 2 of 6 rows (parallelism=fsdp2, lr<0.01)." in out
    page = sweep / "page.html"
    assert compare([*given, "--html", str(page)]) == 0
    text = page.read_text().partition("<script")[0]
    assert "Shown: 2 of 6 rows" in text

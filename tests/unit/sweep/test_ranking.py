"""The ranking of a grid: order, marks of differences in speed, and lines that fit a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshrunner.runner import cli
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.predict import Forecast, MemoryForecast, SpeedForecast, Verdict
from meshrunner.runner.rundir import Environment
from meshrunner.runner.sweep import ranking
from meshrunner.runner.sweep.ranking import Ranked, _against, _sort_key, columns, lines

CONFIG = {"model": {"kind": "llama"}, "seq_len": 8192, "launch": {"nodes": 1}}
CHOICES = {"model": "llama3_8b", "hardware": "h100_80gb"}
BASIS = "uncalibrated; published bf16 runs were predicted to within 7%"
REASON = "118.01 GiB active of the 77.61 GiB available to torch on H100 80GB: 40.40 GiB too much"


def forecast(verdict: str, wps: float | None = None, gib: float | None = None, reason: str = "why") -> Forecast:
    speed = None if wps is None else SpeedForecast(wps, 40.0, 1.0, {}, 0.0, False, 7.0, BASIS)
    memory = None if gib is None else MemoryForecast(gib, 1.0, None, None, None, 0.0, "forward", {}, None, 2.0)
    return Forecast(Verdict(verdict, reason), memory, speed)


def ranked(found: Forecast, *varying: str, batch: int = 8, **config: Any) -> Ranked:
    records = {Environment: Environment(resolved={"global_batch": batch, "launch.workers": 8})}
    run = Run(Path("run"), "pending", records=records, config=CONFIG | config, choices=CHOICES)
    return Ranked(["model=llama3_8b", *varying], list(varying), found, run)


def test_fastest_combination_that_fits_is_first() -> None:
    rows = [
        ranked(forecast("skipped"), "e"),
        ranked(forecast("does not fit", 900.0, 99.0), "d"),
        ranked(forecast("fits", 100.0, 2.0), "b"),
        ranked(forecast("borderline", 800.0, 80.0), "c"),
        ranked(forecast("fits", 1200.0, 3.0), "a"),
    ]
    rows.sort(key=_sort_key)
    assert [each.varying for each in rows] == [["a"], ["b"], ["c"], ["d"], ["e"]]
    cells = columns(rows)
    assert cells["WPS"] == ["1,200 ±7%", "100 ±7%", "800 ±7%", "900 ±7%", ""] and "reserved" not in cells
    slow = [ranked(forecast("fits", gib=gib)) for gib in (3.0, 1.0)]
    assert columns(sorted(slow, key=_sort_key))["active"] == ["1.00", "3.00"], "speeds of CPUs are not known"


def marks(*rows: Ranked) -> list[tuple[float | None, str]]:
    compared = [_against(each, rows[0]) for each in rows]
    found = [each.as_json() for each in compared]
    assert [each["perf/vs_first_pct"] for each in found] == [each.ahead_pct for each in compared]
    return [(each.ahead_pct and round(each.ahead_pct, 1), each.mark) for each in compared]


def test_speeds_closer_than_the_error_are_marked() -> None:
    fits = [ranked(forecast("fits", wps)) for wps in (1000.0, 940.0, 920.0)]
    larger = ranked(forecast("does not fit", 1080.0))
    assert marks(*fits, larger) == [(None, ""), (-6.0, "within error"), (-8.0, ""), (8.0, "")]
    first = ranked(forecast("fits", None, 1.0))
    assert marks(first, first) == [(None, "")] * 2, "speeds of CPUs are not known"
    (text,) = [line for line in lines([_against(each, fits[0]) for each in fits], 200) if line.startswith("~")]
    assert text == "~ within error: differs from the first row's speed by less than the error of predictions"


def test_unlike_work_is_not_compared() -> None:
    fits = forecast("fits", 1000.0)
    rows = [
        ranked(fits),
        ranked(fits, batch=12),
        ranked(fits, seq_len=256),
        ranked(fits, model={"kind": "llama", "dim": 64}),
    ]
    assert marks(*rows) == [(None, ""), (None, "other batch"), (None, "other length"), (None, "other model")]
    text = "\n".join(lines([_against(each, rows[0]) for each in rows], 200))
    assert (
        "differs (8, 12 sequences), which affects the speed; global_batch=24 makes the batch equal in all rows" in text
    )
    assert "other length: speeds of rows that differ in seq_len cannot be compared; use a single seq_len" in text
    assert "other model: " in text and "~" not in text
    assert rows[1].as_json()["global_batch"] == 12


LAYOUTS = ("fsdp1", "fsdp2", "hsdp2", "fsdp2_tp")
RECOMPUTE = ("none", "selective_op", "full")


def grid(*further: str) -> list[Ranked]:
    """Twenty-four combinations, half of which have another batch, with every verdict."""
    rows = []
    for layout in LAYOUTS:
        for recompute in RECOMPUTE:
            for batch in (1, 2):
                typed = (
                    f"parallelism={layout}",
                    f"activation_checkpoint={recompute}",
                    f"micro_batch={batch}",
                    *further,
                )
                verdict = "does not fit" if (recompute, batch) == ("none", 2) else "fits"
                found = forecast(verdict, 7000.0 - 100 * len(rows), 118.01, REASON)
                rows.append(ranked(found, *typed, batch=8 * batch))
    rows[3] = rows[3]._replace(forecast=forecast("skipped", reason="sweep.exclude: activation_checkpoint=full"))
    rows[5] = rows[5]._replace(forecast=rows[3].forecast)
    rows.sort(key=_sort_key)
    return [_against(each, rows[0]) for each in rows]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal_and_no_cell_is_broken(width: int) -> None:
    rows = grid()
    text = [line for part in lines(rows, width) for line in part.splitlines()]
    assert max(map(len, text)) <= width
    assert " ".join(text[:2]).startswith(
        "in all rows: model=llama3_8b hardware=h100_80gb launch.nodes=1 launch.workers=8"
    )
    title = next(line for line in text if line.startswith("  combination"))
    assert ("MFU" in title) == (width >= 80) and ("step time" in title) == (width >= 120)
    said = [line for line in text if re.match("  [fh]sdp", line)]
    assert len(said) == len(rows) == 24
    for line, each in zip(said, rows, strict=True):
        figures = [cells[rows.index(each)].strip() for title_, cells in columns(rows).items() if title_ in title]
        assert all(figure in line for figure in figures), line
        assert width < 80 or [f"{each.varying[2]}"] == re.findall(r"micro_batch=\d", line)
    assert "fits: 18 of 24" in text and "does not fit: 4 of 24" in text and "skipped: 2 of 24" in text
    assert " ".join("\n".join(text).split()).count("sweep.exclude") == 1, "rows with one reason share it"


def test_long_names_wrap_between_words() -> None:
    text = [line for part in lines(grid("model.n_layers=16", "optimizer.lr=0.001"), 80) for line in part.splitlines()]
    assert max(map(len, text)) <= 80 and "optimizer.lr" not in "".join(text)
    assert " ".join(text).split().count("lr=0.001") == 24


def test_both_peaks_stay_on_a_narrow_terminal() -> None:
    memory = MemoryForecast(9.0, 1.0, 10.0, 1.0, None, 0.0, "forward", {}, None, 2.0)
    found = forecast("fits", 1e3)
    rows = [ranked(Forecast(found.verdict, memory, found.speed), name * 35) for name in "ab"]
    rows[1] = rows[1]._replace(mark="other batch")
    text = list(lines(rows, 80))
    title = next(line for line in text if "combination" in line)
    assert title.split()[1:] == ["WPS", "vs", "first", "active", "reserved"] and len(title) <= 80
    assert "reserved: peak memory of the allocator on the same rank, in GiB" in text


def test_a_grid_composes_ranks_and_warns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def predict_all(configs: list[dict[str, Any]], **_: Any) -> list[Forecast]:
        return [forecast("fits", 1000.0 + each["micro_batch"], 9.0) for each in configs]

    monkeypatch.setattr(ranking, "predict_all", predict_all)
    command = ["plan", "-m", "model=llama3_70b", "hardware=h100_80gb", "micro_batch=1,2", "parallelism=fsdp2,fsdp2_tp"]
    assert cli._dispatch(command) == 0
    said = capsys.readouterr()
    assert "seq_len=256 is the default for tiny models" in said.err
    assert "parallelism.tensor" not in said.out and "seq_len=256" in " ".join(said.out.split())
    assert cli._dispatch([*command, "seq_len=256", "--json"]) == 0
    said = capsys.readouterr()
    assert "tiny" not in said.err
    found = json.loads(said.out)
    assert {each["global_batch"] for each in found} == {4, 8, 16} and found[0]["perf/vs_first_mark"] == ""
    for each in found[1:]:
        alike = each["global_batch"] == found[0]["global_batch"]
        assert each["perf/vs_first_mark"] == ("within error" if alike else "other batch")
    assert cli._dispatch(["plan", "-m", "hardware=h100_80gb", "seed=1,1"]) == 0
    assert "  h100_80gb seed=1 " in capsys.readouterr().out, "combinations that do not differ"

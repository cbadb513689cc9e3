"""The sentences above a table, against ones computed by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.findings import common, findings
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.compare.select import select
from meshrunner.runner.compare.table import markdown
from tests.run_dirs import make_run

CPU = "perf/tokens_per_cpu_s_median"


def repeats(folder: Path, name: str, *overrides: str, wps: Sequence[float], **further: Any) -> None:
    for i, value in enumerate(wps):
        make_run(folder / f"{name}-{i}", *overrides, wps=value, **further)


def found(folder: Path, baseline: str | None = None) -> list[str]:
    sentences = findings(compare_runs(read_runs([folder]), baseline))
    assert all(sentence.endswith(".") for sentence in sentences)
    return [sentence.removesuffix(".") for sentence in sentences]


def peak(gib: float) -> dict[str, Any]:
    return {"memory/peak_active_gib": gib, "memory/peak_reserved_gib": gib + 1}


def test_a_sweep_whose_differences_are_all_tested(tmp_path: Path) -> None:
    for recompute, layout, wps, gib in (
        ("none", "fsdp1", 1000, 40.0),
        ("none", "fsdp2", 1100, 38.0),
        ("full", "fsdp1", 800, 20.0),
        ("full", "fsdp2", 840, 19.0),
    ):
        repeats(
            tmp_path,
            f"{recompute}-{layout}",
            f"activation_checkpoint={recompute}",
            f"parallelism={layout}",
            wps=(wps - 1, wps, wps + 1),
            summary=peak(gib),
        )
    assert found(tmp_path, "parallelism=fsdp1") == [
        "Fastest: none fsdp2 (1,100 WPS per device); least memory: full fsdp2 (20.00 GiB peak reserved)",
        "fsdp2 against fsdp1: WPS per device +7.5% at the median, +5.0% to +10.0% over 2 pairs; peak reserved -4.8%",
        "Losses are identical in all 2 pairs",
    ]
    assert found(tmp_path) == [
        "Fastest: fsdp2 none (1,100 WPS per device); least memory: fsdp2 full (20.00 GiB peak reserved)"
    ]


def test_a_sweep_with_noise_and_without_repeats(tmp_path: Path) -> None:
    repeats(tmp_path, "a", "parallelism=fsdp1", wps=(100, 110, 120))
    repeats(tmp_path, "b", "parallelism=fsdp2", wps=(102, 109, 125), losses=(6.0, 5.00001, 4.0))
    repeats(tmp_path, "c", "parallelism=fsdp1", "steps=5", wps=(50,))
    repeats(tmp_path, "d", "parallelism=fsdp2", "steps=5", wps=(500,), losses=(6.0, 4.0, 2.0))
    assert found(tmp_path, "parallelism=fsdp1") == [
        "No tested row is faster than another by more than noise (WPS per device)",
        "fsdp2 against fsdp1: no difference in WPS per device beyond the noise of 3 repeats (+1.7%); 1 more pair not tested",
        "Losses differ in 1 of 2 pairs: steps=5 fsdp2",
    ]


def test_what_is_not_tested_is_provisional(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "parallelism=fsdp1", wps=100)
    make_run(tmp_path / "b", "parallelism=fsdp2", wps=200)
    assert found(tmp_path, "parallelism=fsdp1") == [
        "Fastest so far (one run per row): fsdp2 (200 WPS per device), 100.0% ahead of the next row. The lead is not "
        "tested for noise: a test needs 3 completed runs of a combination (sweep.repeat=3 or auto)",
        "Losses are identical in 1 pair",
    ]


def test_a_sweep_that_failed_mostly(tmp_path: Path) -> None:
    """24 combinations: without recompute 4 and more do not fit, one layout is refused in float8, one run failed."""
    grid = product(("none", "full"), ("fsdp1", "fsdp2"), (1, 2, 4, 8), ("fp32", "bf16"))
    for i, (recompute, layout, batch, precision) in enumerate(grid):
        state = "oom" if recompute == "none" and batch >= 4 else "completed"
        state = "skipped" if layout == "fsdp1" and precision == "bf16" else state
        state = "failed" if (recompute, layout, batch, precision) == ("full", "fsdp2", 8, "fp32") else state
        overrides = (f"activation_checkpoint={recompute}", f"parallelism={layout}", f"micro_batch={batch}")
        make_run(tmp_path / f"{i:02}", *overrides, f"precision={precision}", state=state, reason=state)
    assert found(tmp_path)[-1] == (
        "6 oom: activation_checkpoint=none with micro_batch >= 4; 8 skipped: parallelism=fsdp1 with precision=bf16; "
        "1 failed: parallelism=fsdp2 with activation_checkpoint=full, precision=fp32, micro_batch=8"
    )


def test_on_cpus_speed_is_tokens_per_cpu_second(tmp_path: Path) -> None:
    for i in range(3):
        make_run(tmp_path / f"a{i}", "parallelism=fsdp1", wps=100 + 30 * i, summary={CPU: 200.0 + i})
        make_run(tmp_path / f"b{i}", "parallelism=fsdp2", wps=90 - 30 * i, summary={CPU: 220.0 + i})
    assert found(tmp_path, "parallelism=fsdp1")[:2] == [
        "Fastest: fsdp2 (221 tokens per CPU-second)",
        "fsdp2 against fsdp1: tokens per CPU-second +10.0%",
    ]


def test_another_global_batch_is_said(tmp_path: Path) -> None:
    for layout, batch, wps in (("fsdp1", 8, 100.0), ("fsdp2", 8, 110.0), ("fsdp1_tp", 4, 90.0)):
        environment = {"resolved": {"global_batch": batch}}
        values = (wps, wps + 1, wps - 1)
        repeats(tmp_path, layout, f"parallelism={layout}", wps=values, tokens=16 * batch, environment=environment)
    comparison = compare_runs(read_runs([tmp_path]), "parallelism=fsdp1")
    assert [each and each.other for each in comparison.against] == [None, "batch", ""]
    text = markdown(comparison)
    assert "-10.0% (other batch)" in text and re.search(r"\+10\.0% +\|", text)
    assert (
        "other batch: the global batch differs (4, 8 sequences), which affects the speed; global_batch=8 makes the "
        "batch equal in all rows" in text
    )
    assert "differs (4, 8 sequences), which" in markdown(select(comparison, ["parallelism=fsdp1_tp"]))
    said = found(tmp_path, "parallelism=fsdp1")
    assert said[1:] == [
        "fsdp1_tp against fsdp1: WPS per device -10.0%; the global batch differs in 1 pair",
        "fsdp2 against fsdp1: WPS per device +10.0%",
        "Losses are identical in 1 of 2 pairs; 1 pair cannot be compared: different global batch",
    ]


def test_between_models_none_is_the_fastest(tmp_path: Path) -> None:
    for seq_len, wps in ((16, 100.0), (32, 200.0)):
        repeats(tmp_path, f"{seq_len}", f"seq_len={seq_len}", wps=(wps, wps + 1, wps + 2))
    assert found(tmp_path) == []


def test_a_repeat_that_failed_is_counted(tmp_path: Path) -> None:
    repeats(tmp_path, "a", "parallelism=fsdp1", wps=(100, 101, 102))
    repeats(tmp_path, "b", "parallelism=fsdp2", wps=(200, 201, 202))
    make_run(tmp_path / "b-3", "parallelism=fsdp2", state="oom")
    assert found(tmp_path) == ["Fastest: fsdp2 (201 WPS per device)", "1 oom: parallelism=fsdp2"]


def test_one_run_says_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("bad", "good", "expected"),
    [
        ("a1 a2", "b1 b2", ["2 x=a"]),
        ("a3 a4 a8", "a1 a2 b3 b4 b8 b1", ["3 x=a with y >= 3"]),
        ("a1 b1 a2 b2", "a3 b3 a4", ["4 y <= 2"]),
        ("a1 b1", "a2 b2 c1", ["2 x=a or b with y=1"]),
        ("a1 b2", "a2 b1", ["1 x=a with y=1", "1 x=b with y=2"]),
        ("a1", "a1", []),
        ("a1 a2", "", []),
        ("a2 a4", "a1 a3 a5", ["2 y=2 or 4"]),
    ],
)
def test_what_rows_have_in_common(bad: str, good: str, expected: list[str]) -> None:
    def rows(names: str) -> list[dict[str, Any]]:
        return [{"x": name[0], "y": int(name[1:])} for name in names.split()]

    assert [f"{count} {words}" for count, words in common(rows(bad), rows(good), ["x", "y"])] == expected

"""Predictions compared with runs that others published, and the error that `plan` states because of them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from itertools import pairwise, product
from typing import Any

import pytest

from bench.published import BEGIN, DOCS, END, SHORT, memory_line, predicted, speed_line
from bench.published_rows import LAYOUTS, ROWS, SOURCES, Row
from meshrunner.runner import cli
from meshrunner.runner.calibrate.fit import MeasuredRun, fit
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.predict.predict import RESERVED_ERROR_PCT
from meshrunner.runner.predict.published import regimes, stated_error
from meshrunner.runner.predict.workload import trace_workload
from tests.composed import experiment

SETUP = (
    *("model=llama2_7b", "hardware=h100_96gb", "seq_len=2048", "micro_batch=8", "precision=bf16", "wrap=rules"),
    *("data=random", "--json"),
)
FSDP2 = LAYOUTS["fsdp2"][:2]
TABLES = DOCS.read_text().partition(BEGIN)[2].partition(END)[0]


def name_of(row: Row) -> str:
    return f"{row.source}: {row.name}: {row.wps[0]:.0f}"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_published_run_is_predicted_to_within_the_stated_error(row: Row) -> None:
    """The docs have the figures that `python -m bench published` would write."""
    found = predicted(row)
    assert f"{speed_line(found)}\n" in TABLES
    run = experiment(*row.overrides).on("cuda")
    hardware = expected_devices(run).hardware
    assert hardware is not None
    assert row.other_program or round(abs(found.speed_error_pct), 1) <= stated_error(run, hardware, found.devices)[0]
    if row.reserved_gib is not None:
        assert found.reserved_gib is not None and f"{memory_line(found)}\n" in TABLES
        fixed, expandable = found.reserved_gib
        # How the runs of titan 2024-12 were started is not known.
        kinds = {"titan 2024-12": [fixed, expandable], "H200": [expandable]}.get(row.source, [fixed])
        error_pct = 1 if row.source == "H200" else RESERVED_ERROR_PCT
        assert row.other_program or kinds == [pytest.approx(row.reserved_gib, rel=error_pct / 100)] * len(kinds)
    if row.active_gib is not None:
        assert found.active_gib == pytest.approx(row.active_gib, rel=0.01)


def test_stated_errors_are_the_largest_of_the_table() -> None:
    largest: defaultdict[tuple[str, str, bool], float] = defaultdict(float)
    lines = re.findall(
        r"^\| (.+) \| (.+) \| \d+ (.+) \| ([\d,]+) \| [\d,]+ \((.+)%\) \| [\d,-]+ \|$", TABLES, re.MULTILINE
    )
    assert [(source, re.sub(r" [*†]$", "", name)) for source, name, *_ in lines] == [(r.source, r.name) for r in ROWS]
    for _, name, hardware, tokens, error in lines:
        if name.endswith("†"):
            continue
        key = hardware, "float8" if "float8" in name else "bf16", int(tokens.replace(",", "")) > SHORT
        largest[key] = max(largest[key], abs(float(error)))
    stated = {(each.hardware, each.precision, each.longest > SHORT): each.speed_pct for each in regimes()}
    assert stated == {key: math.ceil(error) for key, error in largest.items()}
    assert {row.source for row in ROWS} == set(SOURCES)


@pytest.mark.parametrize(
    ("overrides", "basis"),
    [
        ((), "published bf16 runs on H100 96GB (2,048 to 8,192 tokens, at most 128 devices) were off by up to "),
        (
            ("hardware=a100_80gb", "seq_len=4096", "launch.nodes=16"),
            "published bf16 runs on A100 80GB (4,096 to 8,192 tokens",
        ),
        (("seq_len=512",), "no published run covers bf16 on H100 96GB, 512 tokens, 8 devices;"),
        (("launch.nodes=17",), "no published run covers bf16 on H100 96GB, 2,048 tokens, 136 devices;"),
        (("precision=fp32",), "no published run covers fp32 on H100 96GB, 2,048 tokens, 8 devices;"),
        (
            ("model=mixtral_8x7b", "hardware=h100_96gb"),
            "no published run covers moe in bf16 on H100 96GB, 2,048 tokens, 8 devices;",
        ),
        (
            ("hardware=h200", "seq_len=4096", "launch.workers=1"),
            "published bf16 runs on H200 (4,096 tokens, at most 1 device)",
        ),
        (
            ("hardware=h200", "seq_len=4096"),
            "no published run covers bf16 on H200, 4,096 tokens, 8 devices;",
        ),
        (("hardware=b200",), "no published run covers bf16 on B200, 2,048 tokens, 8 devices;"),
    ],
)
def test_error_is_that_of_runs_like_the_run(overrides: tuple[str, ...], basis: str) -> None:
    run = experiment(*SETUP[:-1], *overrides).on("cuda")
    hardware = expected_devices(run).hardware
    assert hardware is not None
    error_pct, error_basis = stated_error(run, hardware, expected_devices(run).workers * run.launch.nodes)
    assert basis in error_basis and f" off by up to {error_pct:g}%" in error_basis
    if "no published run covers" in basis:
        assert error_pct == max(each.speed_pct for each in regimes())


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    assert cli._dispatch(["plan", *SETUP, *overrides]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "gib"), [("full", 20.5), ("selective_op", 47.3)])
def test_current_model_needs_less_memory(recompute: str, gib: float, capsys: pytest.CaptureFixture[str]) -> None:
    """One kernel for a norm, and logits in bf16 that nobody keeps: see docs/plan.md."""
    found = planned(capsys, "--active", *FSDP2, f"activation_checkpoint={recompute}")
    assert found["memory/peak_active_gib"] == pytest.approx(gib, rel=0.005)


@pytest.mark.slow
def test_speed_falls_with_the_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal work for each; from 8 to 16 a smaller share of the optimizer's work may make up for slower links."""
    ranks = {8: 1, 16: 2, 128: 16, 1024: 128, 4096: 512}
    full = (*FSDP2, "activation_checkpoint=full", "--active")
    wps = [planned(capsys, *full, f"launch.nodes={nodes}")["perf/wps"] for nodes in ranks.values()]
    assert wps[1] <= 1.005 * wps[0]
    assert all(fewer > more for fewer, more in pairwise(wps[1:])), wps


def observed(row: Row) -> MeasuredRun:
    run = experiment(*row.overrides).on("cuda")
    return MeasuredRun(row.name, trace_workload(run, expected_devices(run)), sum(row.wps) / 2)


@pytest.mark.slow
def test_calibrated_with_an_eager_and_a_compiled_row() -> None:
    """All pairs are in docs/measurements/plan.md."""
    rows = [row for row in ROWS if row.source == "PR 165" and row.fitted]
    runs = [observed(row) for row in rows]
    eager, compiled = runs[:4], runs[4:]
    assert [each.name.endswith("compiled") for each in runs] == [False] * 4 + [True] * 2
    hardware = expected_devices(runs[0].workload.experiment).hardware
    assert hardware is not None
    for one, other in product(eager, compiled):
        fitted = fit(hardware, [one, other])
        for each, row in zip(runs, rows, strict=True):
            wps = each.workload.wps(fitted.hardware)
            assert row.wps[0] / 1.035 <= wps <= row.wps[1] * 1.035, (one.name, other.name, each.name)
            if (one, other) == (eager[0], compiled[0]):
                assert fitted.tells_apart and wps == pytest.approx(each.wps, rel=0.035), each.name
    assert not fit(hardware, eager).tells_apart
    assert not fit(hardware, compiled).tells_apart

"""
Predictions against what torchtitan published in pull request #165: Llama-2 7B on 8 H100s of 95.04 GiB, sequences of 2,048 tokens,
8 of them on a device, bf16, units are the blocks, the last block stays gathered under FSDP2. And against what its team measured
at the end of that year on the same devices, which no constant was chosen after: Llama 3 on 8, 128 and 256 of them.
"""

from __future__ import annotations

import json
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest

from meshrunner.runner import cli
from meshrunner.runner.calibrate.fit import MeasuredRun, fit
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.predict.predict import RESERVED_ERROR_PCT
from meshrunner.runner.predict.workload import trace_workload
from tests.composed import experiment

SETUP = (
    *("model=llama2_7b", "hardware=h100_96gb", "seq_len=2048", "micro_batch=8", "precision=bf16", "wrap=rules"),
    "launch.env.PYTORCH_ALLOC_CONF=expandable_segments:False",  # torch's default, and so theirs
    *("data=random", "--json"),
)
AS_THEN = ("model.kind=tests.titan2024:Titan2024", "loss.kind=tests.titan2024:Logits")
LAYOUTS = {
    "fsdp1": ("parallelism=fsdp1", "parallelism.reshard_after_forward=always"),
    "fsdp2": ("parallelism=fsdp2", "parallelism.reshard_after_forward=except_last"),
}
LOSS_OUTSIDE = {
    "fsdp1": "parallelism.kind=tests.titan2024:FSDP1Then",
    "fsdp2": "parallelism.kind=tests.titan2024:FSDP2Then",
}


def recomputed(recompute: str, *, compiled: bool) -> tuple[str, ...]:
    """Compilers saw whole blocks recomputed then."""
    inside = compiled and recompute == "full"
    kind = ("activation_checkpoint.kind=tests.titan2024:FullInside",) if inside else ()
    return (f"activation_checkpoint={recompute}", *kind, *(("compile=per_block",) if compiled else ()))


class Row(NamedTuple):
    """As published: percent of the device's memory, words per second per device from and to."""

    active_pct: float
    reserved_pct: float
    wps: tuple[float, float]


PUBLISHED = {
    ("fsdp1", "full"): Row(24.81, 33.82, (6100, 6200)),
    ("fsdp1", "selective_op"): Row(52.98, 67.23, (6500, 6700)),
    ("fsdp2", "full"): Row(23.92, 32.64, (6100, 6300)),
    ("fsdp2", "selective_op"): Row(52.13, 62.51, (6600, 6800)),
}
ACTIVE_WITHIN = {"fsdp1": 0.01, "fsdp2": 0.005}


class Other(NamedTuple):
    """Of what no constant was chosen after."""

    overrides: tuple[str, ...]
    reserved_gib: float
    wps: tuple[float, float] | None
    """None: not of the same program."""


def of_llama2(batch: int, recompute: str) -> tuple[str, ...]:
    """Compiled by block, from the pull request's list of how far MFU can be pushed."""
    return (
        *AS_THEN,
        LOSS_OUTSIDE["fsdp2"],
        "compile=per_block",
        f"micro_batch={batch}",
        *recomputed(recompute, compiled=True),
    )


def of_llama3(*overrides: str) -> tuple[str, ...]:
    """Llama 3.1 8B, from benchmarks/llama3_h100_202412_torchtitan.md."""
    model = ("model=llama3_8b", "seq_len=8192", "micro_batch=2", "activation_checkpoint=selective_op")
    return (*model, *AS_THEN, "parallelism.kind=tests.titan2024:FSDP2InDecember", *overrides)


FLOAT8 = ("compile=per_block", "precision=float8")
OTHERS = {
    "7B, 16 sequences": Other(of_llama2(16, "selective_op"), 88.23, (8600, 8600)),
    "7B, nothing recomputed": Other(of_llama2(8, "none"), 90.28, (9100, 9300)),
    "8B": Other(of_llama3(), 82.4, (5762, 5762)),
    "8B, compiled": Other(of_llama3("compile=per_block"), 77.0, (6667, 6667)),
    "8B, compiled, float8": Other(of_llama3(*FLOAT8), 76.8, (8532, 8532)),
    "8B on 128": Other(of_llama3("launch.nodes=16"), 67.0, (5605, 5605)),
    "8B on 128, compiled": Other(of_llama3("launch.nodes=16", "compile=per_block"), 62.0, (6514, 6514)),
    "8B on 128, compiled, float8": Other(of_llama3("launch.nodes=16", *FLOAT8), 61.8, (8380, 8380)),
    # Tensor parallelism gathered activations in float8 there.
    "70B on 32 x 8, compiled, float8": Other(
        (
            *("model=llama3_70b", "seq_len=8192", "micro_batch=16", "activation_checkpoint=full", AS_THEN[0]),
            *("launch.nodes=32", "parallelism.tensor=8", *FLOAT8),
        ),
        71.9,
        None,
    ),
}


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    assert cli._dispatch(["plan", *SETUP, *overrides]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "recompute"), PUBLISHED)
def test_a_published_row(layout: str, recompute: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = PUBLISHED[layout, recompute]
    found = planned(capsys, *AS_THEN, *LAYOUTS[layout], LOSS_OUTSIDE[layout], *recomputed(recompute, compiled=False))
    assert found["memory/peak_active_pct"] == pytest.approx(row.active_pct, rel=ACTIVE_WITHIN[layout])
    assert found["memory/peak_reserved_pct"] == pytest.approx(row.reserved_pct, rel=0.07)
    assert found["perf/wps"] == pytest.approx(sum(row.wps) / 2, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_published_row(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """None is further off than every prediction says that it may be."""
    row = OTHERS[name]
    found = planned(capsys, *LAYOUTS["fsdp2"], *row.overrides)
    assert found["memory/peak_reserved_gib"] == pytest.approx(row.reserved_gib, rel=RESERVED_ERROR_PCT / 100)
    assert row.wps is None or found["perf/wps"] == pytest.approx(sum(row.wps) / 2, rel=found["perf/error_pct"] / 100)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "gib"), [("full", 20.4), ("selective_op", 47.2)])
def test_current_model_needs_less_memory(recompute: str, gib: float, capsys: pytest.CaptureFixture[str]) -> None:
    """One kernel for a norm, and logits in bf16 that nobody keeps: see docs/plan.md."""
    found = planned(capsys, "--active", *LAYOUTS["fsdp2"], f"activation_checkpoint={recompute}")
    assert found["memory/peak_active_gib"] == pytest.approx(gib, rel=0.005)


@pytest.mark.slow
def test_speed_falls_with_the_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal work for each; from 8 to 16 a smaller share of the optimizer's work may make up for slower links."""
    ranks = {8: 1, 16: 2, 128: 16, 1024: 128, 4096: 512}
    full = (*LAYOUTS["fsdp2"], "activation_checkpoint=full", "--active")
    wps = [planned(capsys, *full, f"launch.nodes={nodes}")["perf/wps"] for nodes in ranks.values()]
    assert wps[1] <= 1.005 * wps[0]
    assert all(fewer > more for fewer, more in pairwise(wps[1:])), wps


COMPILED = {"full": (28.90, (7200, 7500)), "selective_op": (53.83, (8100, 8400))}
"""GiB reserved and words per second as published, FSDP2 and compiled by block."""


@pytest.mark.slow
@pytest.mark.parametrize("recompute", COMPILED)
def test_a_published_row_of_compiled_code(recompute: str, capsys: pytest.CaptureFixture[str]) -> None:
    reserved, wps = COMPILED[recompute]
    layout = (*LAYOUTS["fsdp2"], LOSS_OUTSIDE["fsdp2"])
    found = planned(capsys, *AS_THEN, *layout, *recomputed(recompute, compiled=True))
    assert found["memory/peak_reserved_gib"] == pytest.approx(reserved, rel=0.04)
    assert found["perf/wps"] == pytest.approx(sum(wps) / 2, rel=0.04)


def observed(layout: str, recompute: str, wps: tuple[float, float], *, compiled: bool = False) -> MeasuredRun:
    overrides = (*AS_THEN, *LAYOUTS[layout], LOSS_OUTSIDE[layout], *recomputed(recompute, compiled=compiled))
    run = experiment(*SETUP[:-1], *overrides).on("cuda")
    return MeasuredRun(f"{layout} {recompute}", trace_workload(run, expected_devices(run)), sum(wps) / 2)


@pytest.mark.slow
def test_calibrated_with_an_eager_and_a_compiled_row() -> None:
    """All pairs are in docs/measurements/plan.md."""
    eager = {key: observed(*key, row.wps) for key, row in PUBLISHED.items()}
    compiled = {key: observed("fsdp2", key, wps, compiled=True) for key, (_, wps) in COMPILED.items()}
    ranges = [row.wps for row in PUBLISHED.values()] + [wps for _, wps in COMPILED.values()]
    hardware = expected_devices(eager["fsdp2", "full"].workload.experiment).hardware
    assert hardware is not None
    for one, other in product(eager.values(), compiled.values()):
        fitted = fit(hardware, [one, other])
        for each, (least, most) in zip((*eager.values(), *compiled.values()), ranges, strict=True):
            wps = each.workload.wps(fitted.hardware)
            assert least / 1.035 <= wps <= most * 1.035, (one.name, other.name, each.name)
            if (one, other) == (eager["fsdp1", "full"], compiled["full"]):
                assert fitted.tells_apart and wps == pytest.approx(each.wps, rel=0.035), each.name
    assert not fit(hardware, list(eager.values())).tells_apart
    assert not fit(hardware, list(compiled.values())).tells_apart

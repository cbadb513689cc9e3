"""Tracing three of many micro batches predicts the memory of all to the byte, and their time."""

from __future__ import annotations

from typing import Any

import pytest

from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.predict.predict import predict
from meshrunner.runner.predict.trace import tracer
from tests.composed import SMALL, experiment

MANY = ("hardware=h100_80gb", "launch.workers=4", "micro_batch=2", "global_batch=72")
LAYOUTS = [
    "parallelism=fsdp2",
    "parallelism=fsdp2 parallelism.accumulate=hold parallelism.prefetch=2",
    "parallelism=fsdp2 precision=fp32 activation_checkpoint=full loss=chunked loss.tokens=13",
    "parallelism=fsdp2_tp",
    "parallelism=hsdp2 activation_checkpoint=selective_op",
    "parallelism=fsdp1 parallelism.accumulate=hold",
    "parallelism=fsdp1",
    "parallelism=ddp",
    "model=moe_tiny model.n_layers=2 seq_len=32 data=random parallelism=fsdp2 parallelism.expert=2",
]


def predicted(layout: str, *, active_only: bool = False) -> dict[str, Any]:
    own = layout.split()
    small = () if layout.startswith("model=") else SMALL
    run = experiment(*small, *MANY, *own)
    return predict(run, expected_devices(run), active_only=active_only).as_json()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_micro_batches_predict_nine(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = predicted(layout)
    monkeypatch.setattr(tracer, "MICRO_BATCHES", 9)
    every = predicted(layout)
    for key in few:
        if key.startswith("memory/"):
            assert few[key] == every[key], key
    assert few["perf/wps"] == pytest.approx(every["perf/wps"], rel=1e-3)
    assert few["perf/seconds_by_part"] == pytest.approx(every["perf/seconds_by_part"], rel=1e-6)
    assert few["perf/exposed_communication_s"] == pytest.approx(every["perf/exposed_communication_s"], rel=2e-2)


@pytest.mark.slow
def test_shallow_models_of_few_micro_batches_predict_deep_ones_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "parallelism=fsdp2 model.n_layers=12"
    few = predicted(deep, active_only=True)
    monkeypatch.setattr(tracer, "MICRO_BATCHES", 9)
    every = predicted(deep, active_only=True)
    assert few["memory/peak_active_gib"] == every["memory/peak_active_gib"]
    assert few["perf/wps"] == pytest.approx(every["perf/wps"], rel=1e-3)

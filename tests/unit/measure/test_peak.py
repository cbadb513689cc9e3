"""The measured peak of a CPU, which MFU is relative to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrunner.recipes.model.base import Flops
from meshrunner.runner.measure import device
from meshrunner.runner.measure.rows import RANK_KEYS, Rows, Step

ZERO = torch.tensor(0.0)
REST: dict[str, Any] = {
    **dict.fromkeys(("loss", "grad_norm"), ZERO),
    **dict.fromkeys(("lr", "data_time", "cpu_time", "compile_time", "checkpoint_time", "begin", "end"), 0.0),
    "observed": {},
    "profiled": False,
}
CONTEXT: Any = SimpleNamespace(
    attempt=1, world_size=1, device_type="cpu", records=True, threads=1, doing=lambda _: None
)


def test_the_best_peak_is_kept_with_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path))
    measured = iter((5e10, 8e10, 7e10))
    monkeypatch.setattr(device, "_measure", lambda _: next(measured))
    monkeypatch.setattr(device.time, "strftime", lambda _: "2026-11-25")
    assert device._cached_peak("fp32", CONTEXT) == 5e10 == device._cached_peak("fp32", CONTEXT)
    again, remark = device.measured_peak("fp32", CONTEXT)
    assert again == 8e10 == device._cached_peak("fp32", CONTEXT)
    assert "measured on 2026-11-25" in remark and "0.05 TFLOP/s may be too low. A new measurement found 0.08" in remark
    assert device.measured_peak("fp32", CONTEXT)[0] == 8e10, "a busy machine does not lower the peak"


def test_the_peak_of_a_cpu_is_measured_again_and_that_of_a_gpu_is_to_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "measured_peak", lambda *_: (1.0, "measured again"))
    assert device.peak_remark("fp32", CONTEXT) == "measured again"
    gpu: Any = SimpleNamespace(device_type="cuda")
    assert device.peak_remark("bf16", gpu).endswith("check hardware.peak.bf16")


def test_a_peak_of_an_earlier_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path))
    (tmp_path / "cpu_peak.json").write_text(json.dumps({device._peak_key("fp32", CONTEXT): 6e10}))
    assert device._cached_peak("fp32", CONTEXT) == 6e10


def test_mfu_above_the_peak_is_unknown() -> None:
    rows = Rows(CONTEXT, Flops(10, 0), peak=1000.0, tokens=0)
    ranks = torch.ones(1, 2, len(RANK_KEYS), dtype=torch.float64)
    steps = [Step(number=i, tokens=tokens, **REST) for i, tokens in ((1, 90), (2, 110))]  # 900 and 1,100 FLOP/s
    found = rows.of(steps, [1.0, 1.0], ranks, window=2.0, times=[1.0, 2.0], joules=math.nan)
    assert found[0]["perf/mfu"] == pytest.approx(90) and rows.beyond_peak
    assert found[1]["perf/mfu"] is None and found[1]["perf/mfu_causal"] is None

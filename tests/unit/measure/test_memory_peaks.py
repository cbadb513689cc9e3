"""Peak reserved memory is that of the steps: what drawing the weights left in the allocator's cache is given back before them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrunner.runner.measure import meter as meter_module
from meshrunner.runner.measure.device import CudaDevice, HostDevice
from meshrunner.runner.measure.meter import RunMeter
from tests.composed import experiment


def test_what_is_only_cached_is_returned_once_nothing_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(meter_module.gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    CudaDevice.release_cached(CudaDevice.__new__(CudaDevice))
    assert done == ["collect", "empty"]
    HostDevice().release_cached()
    assert done == ["collect", "empty"], "a CPU has none"


def test_it_is_done_when_the_model_is_built_and_before_a_step_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Memory(HostDevice):
        def release_cached(self) -> None:
            done.append("released")

    context: Any = SimpleNamespace(rank=1, records=False, emulated=False, world_size=2, attempt=1, doing=lambda _: None)
    run = RunMeter(experiment(), tmp_path, context)
    monkeypatch.setattr(meter_module, "HostDevice", Memory)
    monkeypatch.setattr(meter_module, "peak_flops", lambda *_: (None, {}))
    monkeypatch.setattr(run.profiler, "step_begins", lambda: done.append("step"))
    run.started(device=torch.device("cpu"), params=1, describe_data=dict)
    assert done == ["released", "step"]

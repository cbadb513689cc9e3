"""Peak reserved memory is that of the steps: what drawing the weights left in the allocator's cache is given back before them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrunner.runner.measure import meter as meter_module
from meshrunner.runner.measure.device import CudaDevice, HostDevice
from meshrunner.runner.measure.meter import RunMeter
from meshrunner.runner.rundir.files import SUMMARY
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


def test_the_peak_of_a_captured_step_is_that_of_its_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of the steps before the capture are those of the start-up."""
    stats = {"active_bytes.all.peak": 0, "reserved_bytes.all.peak": 0, "num_alloc_retries": 0}

    def hold(active: int, reserved: int) -> None:
        stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"] = active * 2**30, reserved * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**36, uuid="1"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: hold(1, 4))
    monkeypatch.setattr(RunMeter, "_gather", lambda _, values: torch.tensor([values]))
    context: Any = SimpleNamespace(rank=0, records=True, emulated=False, world_size=1, attempt=1, doing=lambda _: None)
    run = RunMeter(experiment(), tmp_path, context)
    run.device = CudaDevice(torch.device("cuda", 0))
    assert run.events is not None
    run.events.close()
    hold(9, 10)
    with run.capturing():
        hold(6, 8)
    run._begin_measuring()
    assert run.device.peaks()[:2] == [6, 4]
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert (summary["memory/startup_peak_active_gib"], summary["memory/startup_peak_reserved_gib"]) == (9, 10)

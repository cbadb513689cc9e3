"""The energy that a GPU has used, as NVML counts it."""

import ctypes
import math
from typing import Any

import pytest

from meshrunner.runner.measure.device import energy_counter


class Driver:
    """A stand-in for NVML that knows one GPU."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        return 0 if uuid == b"GPU-ab-1" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:
        millijoules._obj.value = 1500
        return self.error


def test_energy_is_in_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    assert energy_counter("ab-1")() == 1.5


@pytest.mark.parametrize(("uuid", "error"), [("another", 0), ("ab-1", 3)])
def test_energy_of_an_unknown_or_unsupported_gpu_is_nan(uuid: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(error))
    assert math.isnan(energy_counter(uuid)())


def test_energy_without_the_driver_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert math.isnan(energy_counter("ab-1")())

"""Clocks that time steps without synchronising: the host's clock on a CPU, events in the stream on CUDA."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class DeviceClock(Protocol):
    """Takes time stamps on one device."""

    def stamp(self) -> Any:
        """Return a stamp of the time at which the device completes the work issued so far. Does not wait for it."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two stamps that the device has passed."""


class HostClock:
    """The host's clock, for a CPU, which completes work as it is issued."""

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """CUDA events in the current stream."""

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock for a rank's device."""
    return CudaClock() if device.type == "cuda" else HostClock()

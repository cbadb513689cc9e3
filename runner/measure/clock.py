"""The clock that steps are timed by: the host's, or events in the stream of a CUDA device, which the host does not wait for."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Time stamps on one device."""

    def stamp(self) -> Any:
        """The moment at which the device has done what was issued so far. Does not wait for it."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two stamps, both of which the device has reached."""


class HostClock:
    """The clock of a CPU, which has done what was issued."""

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """Events in the current stream."""

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a rank's device."""
    return CudaClock() if device.type == "cuda" else HostClock()

"""Streams and events of the device that meta stands in for. They do nothing but write to the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch

from meshrunner.runner.predict.record.trace_events import (
    COMPUTE,
    EventRecorded,
    HostWaited,
    StreamWaitedForEvent,
    StreamWaitedForStream,
    TraceEvent,
)


class TracedDevice:
    """A device with its streams, one of which is current."""

    def __init__(self) -> None:
        self.write: Callable[[TraceEvent], None] = lambda event: None
        """Receives the events; a recorder sets it."""
        self.stream_numbers = count(COMPUTE)
        self.event_numbers = count()
        self.current = [TracedStream(self)]
        """Nested current streams, the innermost last."""


class TracedStream:
    """A stand-in for `torch.cuda.Stream`."""

    device_index: ClassVar[int] = 0

    def __init__(self, device: TracedDevice, *_: Any, **__: Any) -> None:
        self.device, self.number = device, next(device.stream_numbers)

    def wait_stream(self, other: TracedStream) -> None:
        self.device.write(StreamWaitedForStream(self.number, other.number))

    def wait_event(self, event: TracedEvent | None) -> None:
        if event is not None and event.number is not None:
            self.device.write(StreamWaitedForEvent(self.number, event.number))

    def record_event(self, event: TracedEvent | None = None) -> TracedEvent:
        event = event or TracedEvent(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class TracedEvent:
    """A stand-in for `torch.cuda.Event`."""

    def __init__(self, device: TracedDevice, *_: Any, **__: Any) -> None:
        self.device = device
        self.number: int | None = None
        """None until it is recorded."""

    def record(self, stream: TracedStream | None = None) -> None:
        self.number = next(self.device.event_numbers)
        self.device.write(EventRecorded(self.number, (stream or self.device.current[-1]).number))

    def wait(self, stream: TracedStream | None = None) -> None:
        (stream or self.device.current[-1]).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.number is not None:
            self.device.write(HostWaited(self.number))


class DeviceModule:
    """A stand-in for the module `torch.cuda`, with the functions that FSDP calls."""

    def __init__(self, device: TracedDevice, current_device: Any = 0) -> None:
        """
        Args:
            current_device: result of `current_device()`; FSDP1 compares it with a torch.device.
        """
        self._device, self._current_device = device, current_device
        self.Stream, self.Event = partial(TracedStream, device), partial(TracedEvent, device)

    @contextmanager
    def stream(self, stream: TracedStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        self._device.current.append(stream)
        try:
            yield
        finally:
            self._device.current.pop()

    def current_stream(self, _: Any = None) -> TracedStream:
        return self._device.current[-1]

    def current_device(self) -> Any:
        return self._current_device

    def device_count(self) -> int:
        return torch.iinfo(torch.int32).max

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def set_device(self, _: Any) -> None:
        """Do nothing: there is only one device."""

    def synchronize(self, _: Any = None) -> None:
        self._device.write(HostWaited(None))

    def mem_get_info(self, _: Any = None) -> tuple[int, int]:
        return 0, 0

"""The device that meta stands in for, with streams and events that do nothing but write to the trace."""

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
    TraceEvent,
)

META = torch.device("meta")


class TracedStream:
    """A stand-in for `torch.cuda.Stream`."""

    device_index: ClassVar[int] = 0

    def __init__(self, device: TracedDevice, *_: Any, **__: Any) -> None:
        self.device, self.number = device, next(device.stream_numbers)

    def wait_stream(self, other: TracedStream) -> None:
        self.wait_event(other.record_event())

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
        self.device.write(EventRecorded(self.number, (stream or self.device.current_stream()).number))

    def wait(self, stream: TracedStream | None = None) -> None:
        (stream or self.device.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            self.device.write(HostWaited(self.number))


class TracedDevice:
    """A stand-in for the module `torch.cuda`, with the functions that FSDP calls."""

    def __init__(self) -> None:
        self.write: Callable[[TraceEvent], None] = lambda event: None
        """Receives the events; a recorder sets it."""
        self.stream_numbers = count(COMPUTE)
        self.event_numbers = count()
        self.Stream, self.Event = partial(TracedStream, self), partial(TracedEvent, self)
        self._current = [self.Stream()]
        """Nested current streams, the innermost last."""

    @contextmanager
    def stream(self, stream: TracedStream | None) -> Iterator[None]:
        self._current.append(stream or self.current_stream())
        try:
            yield
        finally:
            self._current.pop()

    def current_stream(self, _: Any = None) -> TracedStream:
        return self._current[-1]

    def current_device(self) -> torch.device:
        return META

    def device_count(self) -> int:
        return torch.iinfo(torch.int32).max

    def is_available(self) -> bool:
        return True

    def synchronize(self, _: Any = None) -> None:
        self.write(HostWaited(None))

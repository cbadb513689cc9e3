"""Streams and events of the device that a rehearsal stands in for: they do nothing and are logged."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import TracebackType
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

NO_WRITER: Callable[[TraceEvent], None] = lambda entry: None  # noqa: E731


class TracedDevice:
    """The device: its streams, of which one is current."""

    def __init__(self) -> None:
        self.write = NO_WRITER
        """Takes what is logged."""
        self._numbers = count(COMPUTE + 1)
        self.events = count()
        compute = TracedStream.__new__(TracedStream)
        compute.device, compute.number = self, COMPUTE
        self.current = [compute]

    def next_stream(self) -> int:
        return next(self._numbers)


class TracedStream:
    """As `torch.cuda.Stream`."""

    device_index: ClassVar[int] = 0
    device: TracedDevice
    """Set on the subclass of a rehearsal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.device.next_stream()

    def wait_stream(self, other: TracedStream) -> None:
        self.device.write(StreamWaitedForStream(self.number, other.number))

    def wait_event(self, event: TracedEvent | None) -> None:
        if event is not None and event.number is not None:
            self.device.write(StreamWaitedForEvent(self.number, event.number))

    def record_event(self, event: TracedEvent | None = None) -> TracedEvent:
        event = event or self.device_event()
        event.record(self)
        return event

    def device_event(self) -> TracedEvent:
        event = TracedEvent.__new__(TracedEvent)
        event.device, event.number = self.device, None
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class TracedEvent:
    """As `torch.cuda.Event`."""

    device: TracedDevice
    """Set on the subclass of a rehearsal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number: int | None = None

    def record(self, stream: TracedStream | None = None) -> None:
        self.number = next(self.device.events)
        self.device.write(EventRecorded(self.number, (stream or self.device.current[-1]).number))

    def wait(self, stream: TracedStream | None = None) -> None:
        (stream or self.device.current[-1]).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.number is not None:
            self.device.write(HostWaited(self.number))


class StreamContext:
    """As `torch.cuda.stream`: a stream is current."""

    def __init__(self, device: TracedDevice, stream: TracedStream | None) -> None:
        self.device, self.stream = device, stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.device.current.append(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.device.current.pop()


class DeviceModule:
    """As the module `torch.cuda`, as far as FSDP asks for it."""

    def __init__(self, device: TracedDevice, current_device: Any = 0) -> None:
        """
        Args:
            current_device: what `current_device()` returns; FSDP1 compares it with a torch.device.
        """
        self._device, self._current_device = device, current_device
        self.Stream = type("Stream", (TracedStream,), {"device": device})
        self.Event = type("Event", (TracedEvent,), {"device": device})

    def stream(self, stream: TracedStream | None) -> StreamContext:
        return StreamContext(self._device, stream)

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
        """There is one."""

    def synchronize(self, _: Any = None) -> None:
        self._device.write(HostWaited(None))

    def mem_get_info(self, _: Any = None) -> tuple[int, int]:
        return 0, 0

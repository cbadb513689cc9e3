"""Defines the events of a trace, logged in the order in which the host issues them, and classes that imitate `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch

from meshrunner.runner.ledger.allocations import Allocation, Phase

META = torch.device("meta")
COMPUTE = 0
"""Number of the default stream, on which compute runs."""


class Allocated(NamedTuple):
    """The host allocates memory on `allocation.stream`."""

    allocation: Allocation


class Freed(NamedTuple):
    """The host frees memory, which other streams may still use (see `UsedByStream`)."""

    allocation: Allocation


class UsedByStream(NamedTuple):
    """`stream` uses memory of another stream, so the memory cannot be reused until `stream` is done (`record_stream`)."""

    allocation: Allocation
    stream: int


class Operator(NamedTuple):
    """The host issues an operator to a stream."""

    name: str
    """Schema name, such as `aten::mm`."""
    kind: str
    """Kind of work: `matmul`, `attention`, `attention_backward` or `memory`."""
    stream: int
    phase: Phase
    flops: int
    dtype: str
    """dtype of the largest input tensor, such as `bfloat16`, or of the largest result if no input is a tensor."""
    nbytes: int
    """Total bytes read and written in device memory."""


class Collective(NamedTuple):
    """The host issues a collective to a stream."""

    name: str
    """Kind of collective: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast."""
    stream: int
    phase: Phase
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    nbytes: int
    """Bytes of the largest buffer: an all-gather's output, a reduction's input, or a rank's input to an all-to-all."""


class PipelinePass(NamedTuple):
    """The host begins or ends a pass of a micro batch through a pipeline stage."""

    name: str
    """`forward`, `backward` or `weights`. If the schedule splits backward, `weights` computes the gradients of the weights."""
    stage: int
    micro_batch: int
    begins: bool


class EventRecorded(NamedTuple):
    """A CUDA event is recorded on a stream."""

    event: int
    stream: int


class StreamWaitedForEvent(NamedTuple):
    """A stream waits for a CUDA event."""

    stream: int
    event: int


class HostWaited(NamedTuple):
    """The host waits for a CUDA event, or for the whole device if `event` is None."""

    event: int | None


class CacheEmptied(NamedTuple):
    """The allocator returns cached memory to the device."""


class CaptureBegan(NamedTuple):
    """The capture of a CUDA graph begins: the allocator empties its cache, then serves requests from the graph's own pools."""


MemoryEvent = Allocated | Freed | UsedByStream | CacheEmptied | CaptureBegan
TraceEvent = MemoryEvent | Operator | Collective | PipelinePass | EventRecorded | StreamWaitedForEvent | HostWaited
EventLog = list[TraceEvent]


class TracedStream:
    """Stand-in for `torch.cuda.Stream`."""

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
    """Stand-in for `torch.cuda.Event`."""

    def __init__(self, device: TracedDevice, *_: Any, **__: Any) -> None:
        self.device = device
        self.number: int | None = None
        """Number of the latest recording of this event, or None if the event has not been recorded yet."""

    def record(self, stream: TracedStream | None = None) -> None:
        self.number = next(self.device.event_numbers)
        self.device.write(EventRecorded(self.number, (stream or self.device.current_stream()).number))

    def wait(self, stream: TracedStream | None = None) -> None:
        (stream or self.device.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            self.device.write(HostWaited(self.number))


class TracedDevice:
    """Stand-in for the module `torch.cuda`. FSDP calls the stand-in's functions, which log events instead of using a GPU."""

    def __init__(self) -> None:
        self.write: Callable[[TraceEvent], None] = lambda event: None
        """Callback that receives each event; set by a recorder."""
        self.stream_numbers = count(COMPUTE)
        self.event_numbers = count()
        self.Stream, self.Event = partial(TracedStream, self), partial(TracedEvent, self)
        self._current = [self.Stream()]
        """Current streams of the nested `stream` contexts, innermost last."""

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

    def empty_cache(self, _: Any = None) -> None:
        self.write(CacheEmptied())

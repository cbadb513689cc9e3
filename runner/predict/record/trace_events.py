"""What a rehearsal writes down in the order of the host: memory that comes and goes, operators, collectives, and who waits."""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.runner.ledger.memory_ledger import Allocation
from meshrunner.runner.ledger.phases import Phase

COMPUTE = 0
"""The stream that the device computes on unless another is named."""


class Allocated(NamedTuple):
    """Memory is allocated, on `life.stream`."""

    allocation: Allocation


class Freed(NamedTuple):
    """The host frees it; other streams may still use it, see `Used`."""

    allocation: Allocation


class UsedByStream(NamedTuple):
    """Another stream than its own uses a life's memory (`record_stream`): freed, it is kept until that stream has passed."""

    allocation: Allocation
    stream: int


class Operator(NamedTuple):
    """An operator that the host has issued to a stream."""

    name: str
    """As in its schema: `aten::mm`."""
    kind: str
    """matmul, attention, attention_backward or memory."""
    stream: int
    phase: Phase
    flops: int
    dtype: str
    """Of its largest input: `bfloat16`."""
    nbytes: int
    """Read and written in device memory."""


class Collective(NamedTuple):
    """A collective that the host has issued."""

    name: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or broadcast."""
    stream: int
    phase: Phase
    ranks: tuple[int, ...]
    """The group's, in the numbering of the world."""
    nbytes: int
    """Of the whole: of an all-gather's output, of a reduction's input, of what a rank sends in an all-to-all."""


class EventRecorded(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int


class StreamWaitedForEvent(NamedTuple):
    """A stream waits for an event."""

    stream: int
    event: int


class StreamWaitedForStream(NamedTuple):
    """A stream waits for all that another was given so far."""

    stream: int
    other: int


class HostWaited(NamedTuple):
    """The host waits for an event; for everything, if it is None."""

    event: int | None


TraceEvent = (
    Allocated
    | Freed
    | UsedByStream
    | Operator
    | Collective
    | EventRecorded
    | StreamWaitedForEvent
    | StreamWaitedForStream
    | HostWaited
)
EventLog = list[TraceEvent]

"""The events of a trace in the order the host issues them: memory, operators, collectives, and synchronisation."""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.runner.ledger.allocations import Allocation, Phase

COMPUTE = 0
"""Number of the default stream, on which the device computes."""


class Allocated(NamedTuple):
    """Memory is allocated on `allocation.stream`."""

    allocation: Allocation


class Freed(NamedTuple):
    """The host frees memory. Other streams may still use it, see `UsedByStream`."""

    allocation: Allocation


class UsedByStream(NamedTuple):
    """Another stream uses the memory (`record_stream`): once freed, it is kept until that stream has passed this point."""

    allocation: Allocation
    stream: int


class Operator(NamedTuple):
    """The host issues an operator to a stream."""

    name: str
    """Schema name, such as `aten::mm`."""
    kind: str
    """matmul, attention, attention_backward or memory."""
    stream: int
    phase: Phase
    flops: int
    dtype: str
    """dtype of the largest input, such as `bfloat16`."""
    nbytes: int
    """Bytes read and written in device memory."""


class Collective(NamedTuple):
    """The host issues a collective to a stream."""

    name: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or broadcast."""
    stream: int
    phase: Phase
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    nbytes: int
    """Size of the largest buffer: an all-gather's output, a reduction's input, a rank's input to an all-to-all."""


class EventRecorded(NamedTuple):
    """A CUDA event is recorded on a stream."""

    event: int
    stream: int


class StreamWaitedForEvent(NamedTuple):
    """A stream waits for a CUDA event."""

    stream: int
    event: int


class HostWaited(NamedTuple):
    """The host waits for a CUDA event, or for the whole device if it is None."""

    event: int | None


TraceEvent = (
    Allocated | Freed | UsedByStream | Operator | Collective | EventRecorded | StreamWaitedForEvent | HostWaited
)
EventLog = list[TraceEvent]

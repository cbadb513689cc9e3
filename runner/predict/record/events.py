"""What a rehearsal writes down in the order of the host: memory that comes and goes, operators, collectives, and who waits."""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.runner.ledger.account import Life
from meshrunner.runner.ledger.phases import Phase

COMPUTE = 0
"""The stream that the device computes on unless another is named."""


class Born(NamedTuple):
    """Memory is allocated, on `life.stream`."""

    life: Life


class Died(NamedTuple):
    """The host frees it; other streams may still use it, see `Used`."""

    life: Life


class Used(NamedTuple):
    """Another stream than its own uses a life's memory (`record_stream`): freed, it is kept until that stream has passed."""

    life: Life
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


class Recorded(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int


class Waited(NamedTuple):
    """A stream waits for an event."""

    stream: int
    event: int


class WaitedForStream(NamedTuple):
    """A stream waits for all that another was given so far."""

    stream: int
    other: int


class HostWaited(NamedTuple):
    """The host waits for an event; for everything, if it is None."""

    event: int | None


Entry = Born | Died | Used | Operator | Collective | Recorded | Waited | WaitedForStream | HostWaited
Log = list[Entry]

"""Replays a trace: allocations go through the allocator model, every other event through a clock."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from meshrunner.runner.ledger.allocations import Allocation
from meshrunner.runner.ledger.categories import CATEGORIES
from meshrunner.runner.ledger.phases import START, Phase
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator, OutOfMemory
from meshrunner.runner.predict.allocator.segments import MemoryBlock
from meshrunner.runner.predict.record.trace_events import (
    Allocated,
    Collective,
    EventLog,
    Freed,
    HostWaited,
    Operator,
    TraceEvent,
    UsedByStream,
)
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock


class InstantClock:
    """Clock of a device whose speed is unknown: all work finishes at once."""

    host = 0.0

    def done_at(self, stream: int) -> float:
        """See `SimulatedClock`."""
        return 0.0

    def take(self, event: TraceEvent) -> None:
        """See `SimulatedClock`."""

    def step_time(self, skipped_micro_batches: int) -> None:
        """Return None: the time of a step is unknown."""


class MemoryChange(NamedTuple):
    """An allocation gets its memory or returns it, or another part of the step begins."""

    allocation: Allocation | None
    """None if a part begins."""
    nbytes: int
    """Size of the allocation's block; negative if it is returned."""
    phase: Phase
    """Phase in which it happens."""
    reserved: int | None
    """Bytes in segments afterwards; None if no allocator is modelled."""


class Peak(NamedTuple):
    """Most memory at one time."""

    nbytes: int
    phase: Phase
    """Phase that reached it. Memory reserved in an earlier step and still held keeps that step's phase."""


class StepPeaks(NamedTuple):
    """Peaks within one step."""

    active: Peak
    """Blocks in use, as torch's `active_bytes`: a freed one counts until the streams that use it are done."""
    reserved: Peak
    """Segments, including the cache, as torch's `reserved_bytes`."""


@dataclass(frozen=True)
class Replayed:
    """Memory of a replayed trace, in bytes."""

    startup_active: int
    """Peak before the first step."""
    startup_reserved: int
    """Peak before the first step. The cache it leaves stays reserved during the steps."""
    steps: dict[int, StepPeaks]
    """Peaks by number of the step, in order."""
    peak_active: Peak
    """Peak of the last step, or of the start if there is no step."""
    peak_reserved: Peak
    """Peak of the last step, or of the start if there is no step."""
    by_category: dict[str, int]
    """Composition of `peak_active`."""
    retries: int
    """Number of times the whole cache was flushed for a request."""
    failed: Phase | None
    """Phase that ran out of memory; peaks are those until then. None if the replay completed."""
    asked: int
    """Size of the request that failed; 0 if the replay completed."""
    changes: list[MemoryChange]
    """Every change of active memory in order; empty unless they are recorded."""


def replay(
    events: EventLog, clock: SimulatedClock | InstantClock, allocator: CachingAllocator, *, record_changes: bool = False
) -> Replayed:
    """Replay the events of a trace on an allocator that has not been used yet."""
    memory = _Replay(clock, allocator, record_changes)
    for event in events:
        if isinstance(event, Allocated):
            try:
                memory.allocate(event.allocation)
            except OutOfMemory as error:
                return memory.result(event.allocation.phase, error.requested)
        elif isinstance(event, Freed):
            memory.free(event.allocation)
        elif isinstance(event, UsedByStream):
            memory.use(event.allocation, event.stream)
        else:
            if isinstance(event, Operator | Collective):
                memory.enter(event.phase)
            clock.take(event)
    return memory.result(None, 0)


class _Replay:
    """Blocks of the live allocations, and the peaks of each step."""

    def __init__(self, clock: SimulatedClock | InstantClock, allocator: CachingAllocator, record_changes: bool) -> None:
        self._clock = clock
        self._allocator = allocator
        allocator.synchronize = self._synchronize
        self._record_changes = record_changes
        self._changes: list[MemoryChange] = []
        self._blocks: dict[Allocation, MemoryBlock] = {}
        self._users: dict[Allocation, set[int]] = {}
        self._in_use: list[tuple[float, int, Allocation, MemoryBlock]] = []
        """Heap of freed allocations that streams still use: until when, its age, the allocation, its block."""
        self._grown = start = Phase(-1, START)
        """Phase in which reserved memory last grew."""
        self._peaks = {start.step: StepPeaks(Peak(0, start), Peak(0, start))}
        self._phase = start
        self._by_category = dict.fromkeys(CATEGORIES, 0)
        self._at_peak = self._by_category
        """`_by_category` at this step's peak of active memory."""

    def allocate(self, allocation: Allocation) -> None:
        """Give an allocation its block; raises OutOfMemory."""
        self.enter(allocation.phase)
        # As in torch, only a request looks at events of freed blocks, and one of no bytes is no request.
        if allocation.nbytes == 0:
            return
        self._return_until(self._clock.host)
        reserved = self._allocator.reserved
        block = self._blocks[allocation] = self._allocator.allocate(allocation.nbytes, allocation.stream)
        self._change(allocation, block.size)
        if self._allocator.reserved > reserved:
            self._grown = self._phase
        peaks = self._peaks[self._phase.step]
        if self._allocator.peak_active > peaks.active.nbytes:
            peaks = peaks._replace(active=Peak(self._allocator.peak_active, self._phase))
            self._at_peak = self._by_category.copy()
        if self._allocator.peak_reserved > peaks.reserved.nbytes:
            peaks = peaks._replace(reserved=Peak(self._allocator.peak_reserved, self._phase))
        self._peaks[self._phase.step] = peaks

    def use(self, allocation: Allocation, stream: int) -> None:
        """Note that a stream uses an allocation."""
        if stream != allocation.stream:
            self._users.setdefault(allocation, set()).add(stream)

    def free(self, allocation: Allocation) -> None:
        """Return an allocation's block, at once or when the other streams that use it are done."""
        block = self._blocks.pop(allocation, None)
        users = self._users.pop(allocation, None)
        if block is None:
            return
        if users is None:
            self._return(allocation, block)
        else:
            until = max(self._clock.done_at(stream) for stream in users)
            heappush(self._in_use, (until, allocation.allocated_at, allocation, block))

    def enter(self, phase: Phase) -> None:
        """Enter a phase. If it belongs to a new step, peaks begin with the memory held at that time."""
        before, self._phase = self._phase, phase
        if phase.part != before.part:
            self._change(None, 0)
        if phase.step != before.step:
            self._allocator.reset_peaks()
            self._at_peak = self._by_category.copy()
            self._peaks[phase.step] = StepPeaks(
                Peak(self._allocator.active, phase), Peak(self._allocator.reserved, self._grown)
            )

    def result(self, failed: Phase | None, asked: int) -> Replayed:
        """Return the peaks so far."""
        steps = dict(self._peaks)
        start = steps.pop(-1)
        last = self._peaks[self._phase.step]
        return Replayed(
            startup_active=start.active.nbytes,
            startup_reserved=start.reserved.nbytes,
            steps=steps,
            peak_active=last.active,
            peak_reserved=last.reserved,
            by_category=self._at_peak,
            retries=self._allocator.retries,
            failed=failed,
            asked=asked,
            changes=self._changes,
        )

    def _return_until(self, now: float) -> None:
        while self._in_use and self._in_use[0][0] <= now:
            self._return(*heappop(self._in_use)[2:])

    def _return(self, allocation: Allocation, block: MemoryBlock) -> None:
        nbytes = block.size  # before the block is merged with its neighbours
        self._allocator.free(block)
        self._change(allocation, -nbytes)

    def _change(self, allocation: Allocation | None, nbytes: int) -> None:
        if allocation is not None:
            self._by_category[allocation.category] += nbytes
        if self._record_changes:
            self._changes.append(MemoryChange(allocation, nbytes, self._phase, self._allocator.reserved))

    def _synchronize(self) -> None:
        # Flushing the cache waits for the whole device (cudaFree), not only for recorded events.
        self._clock.take(HostWaited(None))
        self._return_until(float("inf"))

"""Replays the log of a rehearsal: its memory through a model of the allocator, everything else through a clock."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

from meshrunner.runner.ledger.categories import CATEGORIES
from meshrunner.runner.ledger.memory_ledger import Allocation
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
from meshrunner.runner.predict.replay.peaks import Change, Peak, Peaks, Replayed


class Clock(Protocol):
    """The time of the host and of the device's streams. In seconds."""

    @property
    def host(self) -> float:
        """Now."""

    def passed(self, stream: int) -> float:
        """When the stream will have done all that it was given so far."""

    def take(self, entry: TraceEvent) -> None:
        """The next of the log's entries other than Born, Died and Used; HostWaited(None) also where the allocator waits."""


def replay(log: EventLog, clock: Clock, allocator: CachingAllocator, changes: list[Change] | None = None) -> Replayed:
    """
    In one pass.

    Args:
        allocator: one that nothing was asked of yet.
        changes: gets everything that becomes of active memory, in its order.
    """
    memory = _Memory(clock, allocator, changes)
    for entry in log:
        if isinstance(entry, Allocated):
            try:
                memory.allocate(entry.allocation)
            except OutOfMemory as error:
                return memory.replayed(entry.allocation.phase, error.asked)
        elif isinstance(entry, Freed):
            memory.free(entry.allocation)
        elif isinstance(entry, UsedByStream):
            memory.used(entry.allocation, entry.stream)
        else:
            if isinstance(entry, Operator | Collective):
                memory.enter(entry.phase)
            clock.take(entry)
    return memory.replayed(None, 0)


class _Memory:
    """The blocks of the lives, and the peaks of each step."""

    def __init__(self, clock: Clock, allocator: CachingAllocator, changes: list[Change] | None) -> None:
        self._clock = clock
        self._changes = changes
        self._allocator = allocator
        allocator.synchronize = self._synchronize
        self._blocks: dict[Allocation, MemoryBlock] = {}
        self._users: dict[Allocation, set[int]] = {}
        self._freed: list[tuple[float, int, Allocation, MemoryBlock]] = []
        """A heap of what has died and is still in use: until when, the moment of the life's birth, the life, its block."""
        self._grown = start = Phase(-1, START)
        """In which `reserved` last grew."""
        self._peaks = {start.step: Peaks(Peak(0, start), Peak(0, start))}
        self._step, self._phase = start.step, start
        self._by_category = dict.fromkeys(CATEGORIES, 0)
        self._at_peak = self._by_category
        """Of `_by_category`, when most was active in this step."""

    def allocate(self, allocation: Allocation) -> None:
        """Gives it a block; raises OutOfMemory."""
        self.enter(allocation.phase)
        # As in torch, the events of what was freed are only looked at here, and memory of no bytes is no request.
        if allocation.nbytes == 0:
            return
        self._free_until(self._clock.host)
        reserved = self._allocator.reserved
        block = self._blocks[allocation] = self._allocator.allocate(allocation.nbytes, allocation.stream)
        self._changed(allocation, block.size, allocation.phase)
        if self._allocator.reserved > reserved:
            self._grown = allocation.phase
        peaks = self._peaks[self._step]
        if self._allocator.peak_active > peaks.active.nbytes:
            peaks = peaks._replace(active=Peak(self._allocator.peak_active, allocation.phase))
            self._at_peak = self._by_category.copy()
        if self._allocator.peak_reserved > peaks.reserved.nbytes:
            peaks = peaks._replace(reserved=Peak(self._allocator.peak_reserved, allocation.phase))
        self._peaks[self._step] = peaks

    def used(self, allocation: Allocation, stream: int) -> None:
        """By the stream that it was allocated on, too: that changes nothing."""
        if stream != allocation.stream:
            self._users.setdefault(allocation, set()).add(stream)

    def free(self, allocation: Allocation) -> None:
        """Frees it, now or once the streams that use it have passed this point."""
        block = self._blocks.pop(allocation, None)
        users = self._users.pop(allocation, None)
        if block is None:
            return
        if users is None:
            self._free(allocation, block)
        else:
            heappush(
                self._freed,
                (max(self._clock.passed(stream) for stream in users), allocation.allocated_at, allocation, block),
            )

    def enter(self, phase: Phase) -> None:
        """A new step begins if the phase is of one: its peaks begin with what there is."""
        if phase.part != self._phase.part:
            self._changed(None, 0, phase)
        self._phase = phase
        if phase.step != self._step:
            self._step = phase.step
            self._allocator.reset_peaks()
            self._at_peak = self._by_category.copy()
            self._peaks[phase.step] = Peaks(
                Peak(self._allocator.active, phase), Peak(self._allocator.reserved, self._grown)
            )

    def replayed(self, failed: Phase | None, asked: int) -> Replayed:
        """So far."""
        steps = dict(self._peaks)
        start = steps.pop(-1)
        last = self._peaks[self._step]
        return Replayed(
            *(start.active.nbytes, start.reserved.nbytes, steps, *last, self._at_peak),
            *(self._allocator.retries, failed, asked),
        )

    def _free_until(self, now: float) -> None:
        while self._freed and self._freed[0][0] <= now:
            self._free(*heappop(self._freed)[2:])

    def _free(self, allocation: Allocation, block: MemoryBlock) -> None:
        nbytes = block.size  # before the block is merged with others
        self._allocator.free(block)
        self._changed(allocation, -nbytes, self._phase)

    def _changed(self, allocation: Allocation | None, nbytes: int, phase: Phase) -> None:
        if allocation is not None:
            self._by_category[allocation.category] += nbytes
        if self._changes is not None:
            self._changes.append(Change(allocation, nbytes, phase, self._allocator.reserved))

    def _synchronize(self) -> None:
        # Giving up segments waits for the device (cudaFree), not only for the events.
        self._clock.take(HostWaited(None))
        self._free_until(float("inf"))

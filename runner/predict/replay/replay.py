"""Replays a trace: events about memory go to a model of the caching allocator, and all other events go to a clock."""

from heapq import heappop, heappush

from meshrunner.runner.ledger.allocations import CATEGORIES, START, Allocation, PeakMemory, Phase
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator, OutOfMemory
from meshrunner.runner.predict.allocator.segments import MemoryBlock
from meshrunner.runner.predict.record.trace_events import (
    Allocated,
    CacheEmptied,
    CaptureBegan,
    Collective,
    EventLog,
    Freed,
    HostWaited,
    Operator,
    TraceEvent,
    UsedByStream,
)
from meshrunner.runner.predict.replay.timeline import Point
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock


class InstantClock:
    """Substitute for `SimulatedClock` if the speed of the device is unknown. All work is assumed to take no time."""

    host = 0.0

    def done_at(self, stream: int) -> float:
        return 0.0

    def take(self, event: TraceEvent) -> None:
        pass


Clock = SimulatedClock | InstantClock


def replay(events: EventLog, clock: Clock, allocator: CachingAllocator, *, record_points: bool = False) -> "Replayed":
    """Replay the events of a trace. `clock` and `allocator` must not have been used before."""
    memory = Replayed(clock, allocator, record_points)
    for event in events:
        if isinstance(event, Allocated):
            try:
                memory.allocate(event.allocation)
            except OutOfMemory:
                return memory
        elif isinstance(event, Freed):
            memory.free(event.allocation)
        elif isinstance(event, UsedByStream):
            memory.use(event.allocation, event.stream)
        elif isinstance(event, CacheEmptied):
            allocator.empty_cache()
        elif isinstance(event, CaptureBegan):
            allocator.begin_capture()
        else:
            if isinstance(event, Operator | Collective):
                memory.enter(event.phase)
            clock.take(event)
    memory.completed = True
    return memory


class Replayed:
    """Memory of a replayed trace, in bytes. Peaks are those of the last step, or of the start-up if the trace has no step."""

    def __init__(self, clock: Clock, allocator: CachingAllocator, record_points: bool) -> None:
        self._clock = clock
        self._allocator = allocator
        allocator.synchronize = self._synchronize
        self._record_points = record_points
        self.points: list[Point] = []
        """Memory over the last step; empty unless `record_points` is true."""
        self._blocks: dict[Allocation, MemoryBlock] = {}
        self._users: dict[Allocation, set[int]] = {}
        self._in_use: list[tuple[float, int, Allocation, MemoryBlock]] = []
        """Heap of freed allocations that streams still use: (time when the last use ends, `allocated_at`, allocation, block)."""
        self._phase = Phase(-1, START)
        self._by_category = dict.fromkeys(CATEGORIES, 0)
        self.startup_active = 0
        """Peak bytes of blocks in use before the first step."""
        self.peak = PeakMemory(0, self._by_category, self._phase)
        """Peak bytes of blocks in use (`active_bytes` in torch). A freed block is in use until all streams using it are done."""
        self.completed = False
        """Whether there was enough memory. If memory ran out, the peaks cover only the earlier events."""

    @property
    def peak_reserved(self) -> int:
        """Peak bytes of all segments (`reserved_bytes` in torch), including the cached blocks of earlier steps."""
        return self._allocator.segments.peak

    @property
    def retries(self) -> int:
        """Number of requests for which the allocator flushed its cache."""
        return self._allocator.retries

    def allocate(self, allocation: Allocation) -> None:
        """Allocate a block for an allocation, or raise OutOfMemory."""
        self.enter(allocation.phase)
        # As in torch, an empty request returns before the allocator checks whether streams are done with freed blocks.
        if allocation.nbytes == 0:
            return
        self._return_until(self._clock.host)
        block = self._blocks[allocation] = self._allocator.allocate(allocation.nbytes, allocation.stream)
        self._by_category[allocation.category] += block.size
        self._record()
        if self._allocator.active > self.peak.total:
            self._set_peak()

    def use(self, allocation: Allocation, stream: int) -> None:
        """Record that `stream` uses an allocation. The allocation's block cannot be reused until `stream` is done."""
        if stream != allocation.stream:
            self._users.setdefault(allocation, set()).add(stream)

    def free(self, allocation: Allocation) -> None:
        """Free an allocation's block. If other streams use the allocation, free the block when these streams are done."""
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
        """Enter a phase, such as backward of block 3. If the phase begins a step, reset the peaks to the memory held now."""
        before, self._phase = self._phase, phase
        if phase.step != before.step:
            self._allocator.segments.peak = self._allocator.segments.reserved
            self._set_peak()
            self.points.clear()
        if phase[:2] != before[:2]:
            self._record()

    def _set_peak(self) -> None:
        self.peak = PeakMemory(self._allocator.active, self._by_category.copy(), self._phase)
        if self._phase.step < 0:
            self.startup_active = self.peak.total

    def _return_until(self, now: float) -> None:
        while self._in_use and self._in_use[0][0] <= now:
            self._return(*heappop(self._in_use)[2:])

    def _return(self, allocation: Allocation, block: MemoryBlock) -> None:
        nbytes = block.size  # read this before `free` merges the block with its neighbours
        self._allocator.free(block)
        self._by_category[allocation.category] -= nbytes
        self._record()

    def _record(self) -> None:
        if self._record_points:
            held, reserved = tuple(self._by_category.values()), self._allocator.segments.reserved
            self.points.append(Point(len(self.points), self._phase, held, reserved))

    def _synchronize(self) -> None:
        # A cache flush calls cudaFree, which waits for all work on the device, not only for recorded events.
        self._clock.take(HostWaited(None))
        self._return_until(float("inf"))

"""A log's memory through the allocator: peaks and their phases, blocks that other streams still use, the end of memory."""

from __future__ import annotations

from itertools import count

import pytest

from meshrunner.runner.ledger.allocations import START, Allocation, Phase
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator
from meshrunner.runner.predict.allocator.segments import MIB
from meshrunner.runner.predict.record.trace_events import (
    Allocated,
    CacheEmptied,
    Collective,
    EventLog,
    EventRecorded,
    Freed,
    HostWaited,
    Operator,
    StreamWaitedForEvent,
    TraceEvent,
    UsedByStream,
)
from meshrunner.runner.predict.replay.replay import Replayed, replay

STARTS = Phase(-1, START)
FORWARD, BACKWARD = Phase(0, "forward", 1), Phase(0, "backward", 1)
AGAIN = Phase(1, "forward", 1)
NUMBERS = count()


class Seconds:
    """The host takes a second to issue an operator, which takes its stream as many seconds as it has flops."""

    def __init__(self) -> None:
        self.host = 0.0
        self.taken: list[TraceEvent] = []
        self._passed: dict[int, float] = {}

    def take(self, entry: TraceEvent) -> None:
        self.taken.append(entry)
        if isinstance(entry, Operator):
            self.host += 1
            self._passed[entry.stream] = max(self.host, self.done_at(entry.stream)) + entry.flops
        elif entry == HostWaited(None):
            self.host = max([self.host, *self._passed.values()])

    def done_at(self, stream: int) -> float:
        return self._passed.get(stream, 0)


def allocation(mib: float, phase: Phase = FORWARD, stream: int = 0) -> Allocation:
    return Allocation(int(mib * MIB), "activations", phase, allocated_at=next(NUMBERS), stream=stream)


def operator(seconds: int = 0, stream: int = 0, phase: Phase = FORWARD) -> Operator:
    return Operator("aten::mm", "matmul", stream, phase, seconds, "bfloat16", 0)


def replayed(log: EventLog, capacity: int | None = None, clock: Seconds | None = None) -> Replayed:
    return replay(
        log, clock or Seconds(), CachingAllocator(None if capacity is None else capacity * MIB, expandable=False)
    )


def active(found: Replayed) -> tuple[int, Phase | None]:
    return found.peak.total, found.peak.phase


def test_each_step_has_peaks_of_its_own() -> None:
    """The start has its own peaks; its cache stays reserved."""
    weights, copy = allocation(20, STARTS), allocation(40, STARTS)
    first, second, third, fourth = (
        allocation(10),
        allocation(60, BACKWARD),
        allocation(14, AGAIN),
        allocation(30, AGAIN),
    )
    start = [Allocated(weights), Allocated(copy), Freed(copy)]
    step = [*start, Allocated(first), Allocated(second), Freed(second), Freed(first)]
    found = replayed(start)
    assert found.startup_active == found.peak_reserved == 60 * MIB and active(found) == (60 * MIB, STARTS)
    found = replayed(step)
    assert active(found) == (90 * MIB, BACKWARD) and found.peak_reserved == 120 * MIB
    found = replayed([*step, Allocated(third), Freed(third), Allocated(fourth)])
    assert active(found) == (50 * MIB, AGAIN) and found.startup_active == 60 * MIB
    assert found.peak_reserved == 120 * MIB, "no more is reserved than a step before"
    assert (found.retries, found.completed) == (0, True)


def test_step_begins_with_the_memory_held() -> None:
    """A step begins at its first operator, even without an allocation."""
    kept = allocation(30, STARTS)
    found = replayed([Allocated(kept), operator(), Freed(kept)])
    assert active(found) == (30 * MIB, FORWARD) and found.peak_reserved == 30 * MIB
    found = replayed([Allocated(kept), Collective("all_gather", 1, FORWARD, (0, 1), 8)])
    assert active(found) == (30 * MIB, FORWARD)


def test_memory_used_by_another_stream_is_held_until_that_stream_is_done() -> None:
    """The next request returns it, judged by the host's time; it is active until then."""
    gathered = allocation(20, stream=1)
    log: EventLog = [Allocated(gathered), operator(3), UsedByStream(gathered, 0), Freed(gathered), operator(9)]
    # The operator before the death ends after 4 seconds, the host has issued two.
    early = [*log, Allocated(allocation(20, stream=1))]
    late = [*log, operator(), operator(), Allocated(allocation(20, stream=1))]
    for log, mib in ((early, 40), (late, 20)):
        assert active(replayed(log)) == (mib * MIB, FORWARD) and replayed(log).peak_reserved == mib * MIB
    assert replayed([each for each in early if not isinstance(each, UsedByStream)]).peak.total == 20 * MIB


@pytest.mark.parametrize(("host", "mib"), [(2, 60), (7, 60), (8, 40)])
def test_memory_is_held_until_all_streams_are_done(host: int, mib: int) -> None:
    """The first to be freed is not the first to be returned: the streams are done after 2 and 8 seconds."""
    slow, fast = allocation(20), allocation(20)
    log: EventLog = [Allocated(slow), Allocated(fast), operator(1, 1), operator(6, 2)]
    log += [UsedByStream(slow, 1), UsedByStream(slow, 2), Freed(slow), UsedByStream(fast, 1), Freed(fast)]
    found = replayed([*log, *[operator()] * (host - 2), Allocated(allocation(40))])
    assert found.peak.total == mib * MIB


def test_use_by_the_own_stream_does_not_hold_memory() -> None:
    first = allocation(20)
    found = replayed([Allocated(first), operator(9), UsedByStream(first, 0), Freed(first), Allocated(allocation(20))])
    assert found.peak.total == 20 * MIB


def test_points_of_the_last_step_are_recorded() -> None:
    """Points count the block's size, which is more than the request; a new part of the step is a point, too."""
    gathered, other = allocation(21.5, stream=1), allocation(30, BACKWARD)
    log: EventLog = [
        Allocated(allocation(20, STARTS)),
        Allocated(gathered),
        operator(3),
        UsedByStream(gathered, 0),
        Freed(gathered),
        operator(phase=BACKWARD),
    ]
    log += [operator(9, phase=BACKWARD)] * 3 + [Allocated(other), Freed(other)]
    found = replay(log, Seconds(), CachingAllocator(None, expandable=False), record_points=True)
    assert [(point.at, point.phase, point.total // MIB, (point.reserved or 0) // MIB) for point in found.points] == [
        (0, FORWARD, 20, 20),
        (1, FORWARD, 42, 42),
        (2, BACKWARD, 42, 42),
        (3, BACKWARD, 20, 42),
        (4, BACKWARD, 50, 72),
        (5, BACKWARD, 20, 72),
    ]
    unrecorded = replayed(log)
    assert found.peak.total == 50 * MIB and found.peak == unrecorded.peak and not unrecorded.points
    for name in ("startup_active", "peak_reserved", "retries", "completed"):
        assert getattr(found, name) == getattr(unrecorded, name)


def test_at_the_capacity_the_host_waits_and_the_memory_comes_free() -> None:
    clock = Seconds()
    gathered = allocation(40)
    log: EventLog = [
        Allocated(gathered),
        operator(5, 1),
        UsedByStream(gathered, 1),
        Freed(gathered),
        Allocated(allocation(30, BACKWARD, stream=2)),
    ]
    found = replayed(log, 60, clock)
    assert (found.retries, found.completed) == (1, True)
    assert clock.taken == [log[1], HostWaited(None)]
    assert clock.host == 6
    assert active(found) == (40 * MIB, FORWARD) and found.peak_reserved == 40 * MIB
    assert replayed(log, 70).retries == 0


def test_an_emptied_cache_is_not_reserved_any_more() -> None:
    buffer = allocation(40, stream=1)
    log: EventLog = [Allocated(buffer), Freed(buffer), CacheEmptied(), Allocated(allocation(30, AGAIN))]
    assert replayed(log).peak_reserved == 30 * MIB
    assert replayed([each for each in log if each != CacheEmptied()]).peak_reserved == 70 * MIB


def test_out_of_memory() -> None:
    """Peaks are those until the failure, of the step in which it happens."""
    log: EventLog = [
        Allocated(allocation(30, STARTS)),
        Allocated(allocation(10)),
        Allocated(allocation(70.5, BACKWARD)),
        Allocated(allocation(1, AGAIN)),
    ]
    found = replayed(log, 100)
    assert (found.completed, found.retries) == (False, 1)
    assert active(found) == (40 * MIB, FORWARD)


def test_empty_allocation_is_no_request() -> None:
    empty = allocation(0)
    found = replayed([Allocated(empty), UsedByStream(empty, 1), Freed(empty), Allocated(allocation(0))])
    assert active(found) == (0, FORWARD) and found.peak_reserved == 0


def test_the_clock_takes_all_but_memory_in_order() -> None:
    one = allocation(1)
    others: EventLog = [
        operator(),
        EventRecorded(0, 0),
        Collective("all_gather", 1, FORWARD, (0, 1), 8),
        StreamWaitedForEvent(1, 0),
        HostWaited(0),
    ]
    clock = Seconds()
    replayed([Allocated(one), *others[:3], UsedByStream(one, 1), Freed(one), *others[3:]], clock=clock)
    assert clock.taken == others

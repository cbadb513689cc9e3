"""A log's memory through the allocator: peaks and their phases, blocks that other streams still use, the end of memory."""

from __future__ import annotations

from itertools import count

import pytest

from meshrunner.runner.ledger.account import Life
from meshrunner.runner.ledger.phases import START, Phase
from meshrunner.runner.predict.allocator.allocator import Allocator
from meshrunner.runner.predict.allocator.segments import MIB
from meshrunner.runner.predict.allocator.settings import Settings
from meshrunner.runner.predict.record.events import (
    Born,
    Collective,
    Died,
    Entry,
    HostWaited,
    Log,
    Operator,
    Recorded,
    Used,
    Waited,
    WaitedForStream,
)
from meshrunner.runner.predict.replay.memory import replay
from meshrunner.runner.predict.replay.peaks import Change, Replayed

STARTS = Phase(-1, START)
FORWARD, BACKWARD = Phase(0, "forward", 1), Phase(0, "backward", 1)
AGAIN = Phase(1, "forward", 1)
NUMBERS = count()


class Seconds:
    """The host takes a second to issue an operator, which takes its stream as many seconds as it has flops."""

    def __init__(self) -> None:
        self.host = 0.0
        self.taken: list[Entry] = []
        self._passed: dict[int, float] = {}

    def take(self, entry: Entry) -> None:
        self.taken.append(entry)
        if isinstance(entry, Operator):
            self.host += 1
            self._passed[entry.stream] = max(self.host, self.passed(entry.stream)) + entry.flops
        elif entry == HostWaited(None):
            self.host = max([self.host, *self._passed.values()])

    def passed(self, stream: int) -> float:
        return self._passed.get(stream, 0)


def life(mib: float, phase: Phase = FORWARD, stream: int = 0) -> Life:
    return Life(int(mib * MIB), "activations", phase, born=next(NUMBERS), stream=stream)


def operator(seconds: int = 0, stream: int = 0, phase: Phase = FORWARD) -> Operator:
    return Operator("aten::mm", "matmul", stream, phase, seconds, "bfloat16", 0)


def replayed(log: Log, capacity: int | None = None, clock: Seconds | None = None) -> Replayed:
    return replay(log, clock or Seconds(), Allocator(None if capacity is None else capacity * MIB, Settings()))


def test_each_step_has_peaks_of_its_own() -> None:
    """Of the start, too; its cache stays."""
    weights, copy = life(20, STARTS), life(40, STARTS)
    first, second, third, fourth = life(10), life(60, BACKWARD), life(14, AGAIN), life(30, AGAIN)
    log = [Born(weights), Born(copy), Died(copy), Born(first), Born(second), Died(second), Died(first)]
    found = replayed([*log, Born(third), Died(third), Born(fourth)])
    assert (found.startup_active, found.startup_reserved) == (60 * MIB, 60 * MIB)
    assert found.steps[0].active == (90 * MIB, BACKWARD)
    assert found.steps[0].reserved == (120 * MIB, BACKWARD)
    assert found.steps[1] == (found.peak_active, found.peak_reserved)
    assert found.peak_active == (50 * MIB, AGAIN)
    assert found.peak_reserved == (120 * MIB, BACKWARD), "no more is reserved than a step before"
    assert list(found.steps) == [0, 1]
    assert (found.retries, found.failed, found.asked) == (0, None, 0)


def test_a_step_begins_with_what_there_is() -> None:
    """At its first operator, even if nothing is born in it."""
    kept = life(30, STARTS)
    found = replayed([Born(kept), operator(), Died(kept)])
    assert found.steps[0].active == (30 * MIB, FORWARD)
    assert found.steps[0].reserved == (30 * MIB, STARTS)
    found = replayed([Born(kept), Collective("all_gather", 1, FORWARD, (0, 1), 8)])
    assert list(found.steps) == [0]


def test_nothing_but_the_start() -> None:
    found = replayed([Born(life(30, STARTS))])
    assert (found.steps, found.peak_active) == ({}, (30 * MIB, STARTS))


def test_memory_that_another_stream_uses_is_kept_until_it_has_passed() -> None:
    """By the time of the host, and noticed by the next request only; it is active until then."""
    gathered = life(20, stream=1)
    log: Log = [Born(gathered), operator(3), Used(gathered, 0), Died(gathered), operator(9)]
    # The operator before the death ends after 4 seconds, the host has issued two.
    early = [*log, Born(life(20, stream=1))]
    late = [*log, operator(), operator(), Born(life(20, stream=1))]
    assert replayed(early).peak_active == replayed(early).peak_reserved == (40 * MIB, FORWARD)
    assert replayed(late).peak_active == replayed(late).peak_reserved == (20 * MIB, FORWARD)
    assert replayed([each for each in early if not isinstance(each, Used)]).peak_active.nbytes == 20 * MIB


@pytest.mark.parametrize(("host", "mib"), [(2, 60), (7, 60), (8, 40)])
def test_all_streams_that_use_it_must_have_passed(host: int, mib: int) -> None:
    """The first to die is not the first to be free: the streams pass after 2 and 8 seconds."""
    slow, fast = life(20), life(20)
    log: Log = [Born(slow), Born(fast), operator(1, 1), operator(6, 2)]
    log += [Used(slow, 1), Used(slow, 2), Died(slow), Used(fast, 1), Died(fast)]
    found = replayed([*log, *[operator()] * (host - 2), Born(life(40))])
    assert found.peak_active.nbytes == mib * MIB


def test_its_own_stream_is_no_other() -> None:
    first = life(20)
    found = replayed([Born(first), operator(9), Used(first, 0), Died(first), Born(life(20))])
    assert found.peak_active.nbytes == 20 * MIB


def test_every_change_is_told_when_it_happens() -> None:
    """With the block's size, which is more than was asked for; and where another part of the step begins."""
    gathered, other = life(21.5, stream=1), life(30, BACKWARD)
    log: Log = [Born(gathered), operator(3), Used(gathered, 0), Died(gathered), operator(phase=BACKWARD)]
    log += [operator(9, phase=BACKWARD)] * 3 + [Born(other), Died(other)]
    changes: list[Change] = []
    found = replay(log, Seconds(), Allocator(None, Settings()), changes)
    assert changes == [
        (None, 0, FORWARD, 0),
        (gathered, 22 * MIB, FORWARD, 22 * MIB),
        (None, 0, BACKWARD, 22 * MIB),
        (gathered, -22 * MIB, BACKWARD, 22 * MIB),
        (other, 30 * MIB, BACKWARD, 52 * MIB),
        (other, -30 * MIB, BACKWARD, 52 * MIB),
    ]
    assert found.peak_active.nbytes == 30 * MIB and found == replay(log, Seconds(), Allocator(None, Settings()))


def test_at_the_capacity_the_host_waits_and_the_memory_comes_free() -> None:
    clock = Seconds()
    gathered = life(40)
    log: Log = [Born(gathered), operator(5, 1), Used(gathered, 1), Died(gathered), Born(life(30, BACKWARD, stream=2))]
    found = replayed(log, 60, clock)
    assert (found.retries, found.failed) == (1, None)
    assert clock.taken == [log[1], HostWaited(None)]
    assert clock.host == 6
    assert found.peak_active == found.peak_reserved == (40 * MIB, FORWARD)
    assert replayed(log, 70).retries == 0


def test_out_of_memory() -> None:
    """Peaks are those until then, of the step that it happened in."""
    log: Log = [Born(life(30, STARTS)), Born(life(10)), Born(life(70.5, BACKWARD)), Born(life(1, AGAIN))]
    found = replayed(log, 100)
    assert (found.failed, found.asked, found.retries) == (BACKWARD, 70.5 * MIB, 1)
    assert found.peak_active == (40 * MIB, FORWARD)
    assert list(found.steps) == [0]


def test_memory_of_no_bytes_is_no_request() -> None:
    empty = life(0)
    found = replayed([Born(empty), Used(empty, 1), Died(empty), Born(life(0))])
    assert found.peak_active == (0, FORWARD)
    assert found.peak_reserved.nbytes == 0


def test_the_clock_takes_all_but_memory_in_order() -> None:
    one = life(1)
    others: Log = [
        operator(),
        Recorded(0, 0),
        Collective("all_gather", 1, FORWARD, (0, 1), 8),
        Waited(1, 0),
        WaitedForStream(0, 1),
        HostWaited(0),
    ]
    clock = Seconds()
    replayed([Born(one), *others[:3], Used(one, 1), Died(one), *others[3:]], clock=clock)
    assert clock.taken == others

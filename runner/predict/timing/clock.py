"""
When everything of a log happens: the host issues, streams work one entry after another, and wait for each other.

An operator takes what its arithmetic or its memory traffic takes, whichever is longer (a roofline), a collective what
`collectives.seconds` says. Times are in seconds from the clock's start.
"""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.runner.predict.record.trace_events import (
    COMPUTE,
    Collective,
    EventRecorded,
    HostWaited,
    Operator,
    StreamWaitedForEvent,
    StreamWaitedForStream,
    TraceEvent,
)
from meshrunner.runner.predict.timing.rates import Rates

PARTS = ("matmul", "attention", "memory", "optimizer", "communication")
"""What a step's time goes to. optimizer: every operator after backward, the gradient norm's included."""
PART = {"matmul": "matmul", "attention": "attention", "attention_backward": "attention", "memory": "memory"}
"""By an operator's kind."""
AFTER_BACKWARD = ("update", "optimizer")


class Timed(NamedTuple):
    """Where the time of a step goes."""

    seconds: float
    """From the end of all work before it to the end of its own, what contention adds included."""
    seconds_by_part: dict[str, float]
    """How long streams work on each of PARTS. They overlap: the sum is not the step's time."""
    exposed_communication_s: float
    """Of communication: at least so long the stream of compute has nothing to do."""


class _Group:
    """A communicator: its collectives run one after another."""

    __slots__ = ("passed", "seconds")

    def __init__(self) -> None:
        self.passed = 0.0
        self.seconds: dict[tuple[str, int], float] = {}
        """Of its collectives by name and bytes."""


class _Sums(NamedTuple):
    """Of a step so far."""

    seconds: float
    computing: float
    """Seconds in which the stream of compute has something to do."""
    by_part: dict[str, float]

    def and_again(self, times: int, before: _Sums, after: _Sums) -> _Sums:
        """With what came between two moments so many times more."""
        return _Sums(
            self.seconds + times * (after.seconds - before.seconds),
            self.computing + times * (after.computing - before.computing),
            {part: sum_ + times * (after.by_part[part] - before.by_part[part]) for part, sum_ in self.by_part.items()},
        )


class Clock:
    """Takes the entries of a log in their order."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.host = 0.0
        """When the host has issued all that it issued so far."""
        self._streams: dict[int, float] = {COMPUTE: 0.0}
        self._events: dict[int, float] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._flops: dict[tuple[str, str], float] = {}
        """FLOP/s by kind and dtype."""
        self._bytes, self._kernel_s, self._host_s = rates.bytes_per_second, rates.kernel_s, rates.host_s
        self.step_begins()

    def passed(self, stream: int) -> float:
        """When a stream will have done all that it was given so far."""
        return self._streams.get(stream, 0.0)

    def take(self, entry: TraceEvent) -> None:
        """
        The next entry.

        Raises:
            ConfigError: the device's rate for an operator's dtype is not known.
        """
        if isinstance(entry, Operator):
            self._operator(entry)
        elif isinstance(entry, Collective):
            self._collective(entry)
        elif isinstance(entry, EventRecorded):
            self._events[entry.event] = self.passed(entry.stream)
        elif isinstance(entry, StreamWaitedForEvent):
            # As in CUDA, nobody waits for an event that was never recorded.
            self._streams[entry.stream] = max(self.passed(entry.stream), self._events.get(entry.event, 0.0))
        elif isinstance(entry, StreamWaitedForStream):
            self._streams[entry.stream] = max(self.passed(entry.stream), self.passed(entry.other))
        elif isinstance(entry, HostWaited):
            until = self._everything() if entry.event is None else self._events.get(entry.event, 0.0)
            self.host = max(self.host, until)

    def step_begins(self) -> None:
        """What is taken from now on belongs to a new step."""
        self._began = self._everything()
        self._by_part = dict.fromkeys(PARTS, 0.0)
        self._computing = 0.0
        self._micro_batches: list[_Sums] = []
        """When each began but the first, as `StepClock` sees it."""
        self._since_collective = 0.0

    def step_ends(self, left_out: int = 0) -> Timed:
        """
        The step that began last, up to now.

        Args:
            left_out: micro batches like the last but one that the step has besides.
        """
        sums = self._sums()
        if left_out:
            before, after = self._micro_batches[-2:]
            sums = sums.and_again(left_out, before, after)
        seconds, computing, by_part = sums
        communication = by_part["communication"]
        # Where the host is too slow nothing may run at all, which is no communication.
        exposed = min(max(seconds - computing, 0.0), communication)
        seconds += self.rates.contention * (communication - exposed)
        return Timed(seconds, by_part, exposed)

    def _sums(self) -> _Sums:
        return _Sums(self._everything() - self._began, self._computing, dict(self._by_part))

    def _everything(self) -> float:
        return max(self.host, *self._streams.values())

    def _operator(self, operator: Operator) -> None:
        _, kind, stream, phase, flops, dtype, nbytes = operator
        if not self.rates.overlaps:
            stream = COMPUTE
        seconds = nbytes / self._bytes
        if flops and kind != "memory":
            rate = self._flops.get((kind, dtype))
            if rate is None:
                rate = self._flops[kind, dtype] = self.rates.flops_per_second(kind, dtype)
            seconds = max(seconds, flops / rate)
        seconds += self._kernel_s
        self.host += self._host_s
        self._streams[stream] = max(self._streams.get(stream, 0.0), self.host) + seconds
        self._by_part["optimizer" if phase.part in AFTER_BACKWARD else PART[kind]] += seconds
        if stream == COMPUTE:
            self._computing += seconds
            self._since_collective += seconds

    def _collective(self, collective: Collective) -> None:
        name, stream, _, ranks, nbytes = collective
        if not self.rates.overlaps:
            stream = COMPUTE
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = _Group()
        seconds = group.seconds.get((name, nbytes))
        if seconds is None:
            seconds = group.seconds[name, nbytes] = self.rates.collective_s(name, ranks, nbytes)
        seconds += self.rates.waiting_s(len(ranks), self._since_collective)
        self._since_collective = 0.0
        self.host += self._host_s
        group.passed = self._streams[stream] = max(self.passed(stream), group.passed, self.host) + seconds
        self._by_part["communication"] += seconds


class StepClock(Clock):
    """A clock that sees by the phases where a step begins, and each of its micro batches."""

    _step: int | None = None
    _part = ""

    def take(self, entry: TraceEvent) -> None:
        if isinstance(entry, Operator | Collective):
            step, part, _ = entry.phase
            if step != self._step:
                self._step = step
                self.step_begins()
            elif part == "forward" and self._part not in ("forward", "loss"):
                self._micro_batches.append(self._sums())
            self._part = part
        super().take(entry)

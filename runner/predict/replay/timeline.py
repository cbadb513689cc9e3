"""Builds the timeline of memory over a step: bytes of each category after every allocation and release."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from meshrunner.runner.ledger.allocations import CATEGORIES, START, Phase
from meshrunner.runner.predict.record.trace_events import Allocated, Collective, EventLog, Freed, Operator

POINTS = 2000
"""Approximate maximum number of points in a timeline: about the width of a screen in pixels."""


class Point(NamedTuple):
    """Memory held in a step after an allocation or release, or when a part of the step begins."""

    at: int
    """Index of the point among all points of the step, counted from 0."""
    phase: Phase
    by_category: tuple[int, ...]
    """Bytes of each category, in the order of CATEGORIES."""
    reserved: int | None
    """Bytes that the allocator reserves; None if no allocator is modelled."""

    @property
    def total(self) -> int:
        return sum(self.by_category)


class Part(NamedTuple):
    """Interval of the step, such as the forward, the loss or the backward of one micro batch."""

    name: str
    """A value of `Phase.part`."""
    begins: int
    """`Point.at` of the first point in this part."""
    ends: int
    """`Point.at` of the next part's first point or, in the last part, of the step's last point."""


class Timeline(NamedTuple):
    """Memory over one step."""

    points: list[Point]
    """Points in chronological order; empty if nothing was allocated."""
    parts: list[Part]
    capacity: int
    """Bytes of the device's memory that torch can allocate. The CUDA context and NCCL's buffers take the rest of the memory."""
    memory: int
    """Bytes of the device's memory."""


def timeline(points: list[Point], capacity: int, memory: int, most: int = POINTS) -> Timeline:
    """Return the timeline of one step, with `points` thinned to about `most`."""
    return Timeline(_thinned(points, most), list(_parts(points)), capacity, memory)


def points_without_allocator(events: EventLog, step: int) -> list[Point]:
    """Return the points of a step. Freed memory is assumed to be released at once, even if other streams still use it."""
    points: list[Point] = []
    held, phase = dict.fromkeys(CATEGORIES, 0), Phase(-1, START)

    def record() -> None:
        if phase.step == step:
            points.append(Point(len(points), phase, tuple(held.values()), None))

    for event in events:
        if isinstance(event, Allocated | Operator | Collective):
            before, phase = phase, event.allocation.phase if isinstance(event, Allocated) else event.phase
            if phase[:2] != before[:2]:
                record()
        if isinstance(event, Allocated | Freed):
            allocation = event.allocation
            held[allocation.category] += allocation.nbytes if isinstance(event, Allocated) else -allocation.nbytes
            record()
    return points


def _parts(points: Sequence[Point]) -> Iterator[Part]:
    begins = [(name, next(group).at) for name, group in groupby(points, key=lambda point: point.phase.part)]
    ends = [*begins, ("", points[-1].at)] if points else []
    for (name, begin), (_, end) in pairwise(ends):
        yield Part(name, begin, end)


def _thinned(points: list[Point], most: int) -> list[Point]:
    """Keep about `most` points: the highest of each phase, and the highest and lowest of each group of consecutive points."""
    if len(points) <= most:
        return points
    total, phases = attrgetter("total"), dict[Phase, list[Point]]()
    for point in points:
        phases.setdefault(point.phase, []).append(point)
    kept = {points[0], points[-1], max(points, key=lambda point: point.reserved or 0)}
    kept.update(max(each, key=total) for each in phases.values())
    intervals = max(1, (most - len(kept)) // 2)
    length = -(-len(points) // intervals)
    for begin in range(0, len(points), length):
        interval = points[begin : begin + length]
        kept.update((max(interval, key=total), min(interval, key=total)))
    return sorted(kept)

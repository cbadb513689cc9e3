"""Memory over a step: what is held after every allocation and every release, by category."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from meshrunner.runner.ledger.categories import CATEGORIES
from meshrunner.runner.ledger.phases import START, Phase
from meshrunner.runner.predict.record.trace_events import Allocated, Collective, EventLog, Freed, Operator
from meshrunner.runner.predict.replay.peaks import Change

POINTS = 2000
"""Of a timeline: about as many as a screen has pixels."""


class Point(NamedTuple):
    """What is held at a moment. In bytes."""

    at: int
    """How many changes of the step came before."""
    phase: Phase
    by_category: tuple[int, ...]
    """In the order of CATEGORIES."""
    reserved: int | None
    """None: not known."""

    @property
    def total(self) -> int:
        """Of all categories."""
        return sum(self.by_category)


class Part(NamedTuple):
    """A part of the step, one of phases.PARTS; with several micro batches there are several of a name."""

    name: str
    begins: int
    """As `Point.at`."""
    ends: int


class Timeline(NamedTuple):
    """Of a step, from what it begins with."""

    points: list[Point]
    """Empty: nothing was allocated."""
    parts: list[Part]
    capacity: int
    """Bytes that torch can have of the device's memory."""
    memory: int
    """Bytes of the device."""


def timeline(changes: Iterable[Change], step: int, capacity: int, memory: int, most: int = POINTS) -> Timeline:
    """
    The memory of one step.

    Args:
        changes: from the first allocation of all, to the end of that step.
        step: its number.
        capacity, memory: see `Timeline`.
        most: points that are kept; the highest of each phase and the highest of all are among them.
    """
    found: list[Point] = []
    held, reserved = [0] * len(CATEGORIES), None
    places = {name: place for place, name in enumerate(CATEGORIES)}
    for allocation, nbytes, phase, reserved_then in changes:
        if phase.step == step and not found:
            found.append(Point(0, phase, tuple(held), reserved))
        if allocation is not None:
            held[places[allocation.category]] += nbytes
        reserved = reserved_then
        if found:
            found.append(Point(len(found), phase, tuple(held), reserved))
    return Timeline(_thinned(found, most), list(_parts(found)), capacity, memory)


def changes_of(log: EventLog) -> Iterator[Change]:
    """Those of memory that nothing else uses once it has died, and that no allocator is known of."""
    phase = Phase(-1, START)
    for entry in log:
        if isinstance(entry, Allocated):
            phase = entry.allocation.phase
            yield Change(entry.allocation, entry.allocation.nbytes, phase, None)
        elif isinstance(entry, Freed):
            yield Change(entry.allocation, -entry.allocation.nbytes, phase, None)
        elif isinstance(entry, Operator | Collective) and entry.phase != phase:
            if entry.phase.part != phase.part:
                yield Change(None, 0, entry.phase, None)
            phase = entry.phase


def _parts(points: Sequence[Point]) -> Iterator[Part]:
    begins = [(name, next(group).at) for name, group in groupby(points, key=lambda point: point.phase.part)]
    ends = [*begins, ("", points[-1].at)] if points else []
    for (name, begin), (_, end) in pairwise(ends):
        yield Part(name, begin, end)


def _thinned(points: list[Point], most: int) -> list[Point]:
    """About so many of them: of stretches of equal length the highest and the lowest, and those that have to stay."""
    if len(points) <= most:
        return points
    totals = [point.total for point in points]
    kept = {0, len(points) - 1, _highest(range(len(points)), [point.reserved or 0 for point in points])}
    phases: dict[Phase, list[int]] = {}
    for point in points:
        phases.setdefault(point.phase, []).append(point.at)
    kept.update(_highest(places, totals) for places in phases.values())
    stretches = max(1, (most - len(kept)) // 2)
    length = -(-len(points) // stretches)
    for begin in range(0, len(points), length):
        stretch = range(begin, min(begin + length, len(points)))
        kept.update((_highest(stretch, totals), min(stretch, key=totals.__getitem__)))
    return [points[place] for place in sorted(kept)]


def _highest(places: Iterable[int], values: Sequence[int]) -> int:
    """The first place of the highest value."""
    return max(places, key=values.__getitem__)

"""
Where communication buffers lie: from what units ask for, and what is alive together, to offsets. Neither torch nor devices.

A unit asks for buckets, each of one dtype. `fixed_pool` and `max_pool` are Megatron-FSDP's (Megatron-LM pull request 5462);
`scheduled` is what the order of the units allows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

ALIGNMENT = 256
"""Bytes that a place begins at a multiple of."""


class Bucket(NamedTuple):
    """One buffer that a unit asks for."""

    dtype: str
    nbytes: int


class Unit(NamedTuple):
    """What one unit asks for at once."""

    name: str
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)


class Schedule(NamedTuple):
    """What is to be placed."""

    units: Sequence[Unit]
    """In the order in which they ask first."""
    alive: Collection[frozenset[str]]
    """Names of units whose buckets are alive at the same time; every unit is in one of the sets."""


class Plan(NamedTuple):
    """Places in one arena."""

    offsets: dict[str, tuple[int, ...]]
    """Unit -> where each of its buckets begins, in bytes."""
    nbytes: int
    """Of the arena."""


class FixedPool(NamedTuple):
    """Bytes of a pool for units of one shape."""

    pooled: int
    outside: int
    """Of the units that have another shape."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def alive_together(order: Sequence[str], most: int) -> set[frozenset[str]]:
    """What is alive at the same time if units ask in this order and the last `most` of them are alive."""
    return {frozenset(order[max(0, end - most) : end]) for end in range(1, len(order) + 1)}


def peak(schedule: Schedule) -> int:
    """Most bytes alive at a time: what dynamic buffers take, and less than no plan can."""
    size = _sizes(schedule.units)
    return max((sum(size[name] for name in together) for together in schedule.alive), default=0)


def fixed_pool(units: Sequence[Unit]) -> FixedPool:
    """The commonest shape twice; units of other shapes stay outside."""
    if not units:
        return FixedPool(0, 0)
    [(shape, _)] = Counter(unit.buckets for unit in units).most_common(1)
    outside = sum(unit.nbytes for unit in units if unit.buckets != shape)
    return FixedPool(2 * sum(bucket.nbytes for bucket in shape), outside)


def max_pool(schedule: Schedule) -> Plan:
    """
    Copies of one set of slots, as many as must differ: units that are alive together have different copies.

    A set has, for every dtype, the largest bucket of all units, the largest of those that come second in their unit, and so on.
    """
    slots: dict[tuple[str, int], int] = {}
    slot_of: dict[tuple[str, int], tuple[str, int]] = {}
    for unit in schedule.units:
        number: Counter[str] = Counter()
        for i in sorted(range(len(unit.buckets)), key=lambda i: -unit.buckets[i].nbytes):
            dtype, nbytes = unit.buckets[i]
            slot = slot_of[unit.name, i] = (dtype, number[dtype])
            slots[slot] = max(slots.get(slot, 0), nbytes)
            number[dtype] += 1
    start = dict(zip(slots, accumulate(slots.values(), initial=0), strict=False))
    one = sum(slots.values())
    copy = _copies(schedule)
    offsets = {
        unit.name: tuple(copy[unit.name] * one + start[slot_of[unit.name, i]] for i in range(len(unit.buckets)))
        for unit in schedule.units
    }
    return Plan(offsets, one * (1 + max(copy.values(), default=-1)))


def scheduled(schedule: Schedule) -> Plan:
    """
    One arena in which only units that are alive together lie apart, each in one piece.

    Where these alternate between two sides, one side lies at the bottom and the other at the top, which takes no more than the
    largest pair: the bound. Elsewhere the smallest of three arenas: each unit in the lowest gap that it fits into, the largest
    first, or in their order; or the copies of `max_pool` with one slot each, no larger than the units that lie there.
    """
    size, near = _sizes(schedule.units), _neighbours(schedule)
    if (side := _two_sides(size, near)) is not None:
        nbytes = max([peak(schedule), *size.values()])
        start = {name: side[name] * (nbytes - size[name]) for name in size}
    else:
        descending = sorted(size, key=lambda name: -size[name])
        starts = (_lowest_gaps(descending, size, near), _lowest_gaps(size, size, near), _slots(size, _copies(schedule)))
        nbytes, _, start = min((max(at[name] + size[name] for name in size), i, at) for i, at in enumerate(starts))
    ends = {unit.name: accumulate((bucket.nbytes for bucket in unit.buckets), initial=0) for unit in schedule.units}
    return Plan({name: tuple(start[name] + end for end in list(ends[name])[:-1]) for name in size}, nbytes)


PLANS: dict[str, Callable[[Schedule], Plan]] = {"max_pool": max_pool, "scheduled": scheduled}
"""The plans by the word that chooses one."""


def _sizes(units: Iterable[Unit]) -> dict[str, int]:
    return {unit.name: unit.nbytes for unit in units}


def _neighbours(schedule: Schedule) -> dict[str, set[str]]:
    """Unit -> those that are alive together with it."""
    near: dict[str, set[str]] = defaultdict(set)
    for together in schedule.alive:
        for one, other in combinations(together, 2):
            near[one].add(other)
            near[other].add(one)
    return near


def _copies(schedule: Schedule) -> dict[str, int]:
    """Unit -> the first copy that no unit before it has and is alive together with it."""
    near, copy = _neighbours(schedule), dict[str, int]()
    for unit in schedule.units:
        taken = {copy[other] for other in near[unit.name] if other in copy}
        copy[unit.name] = next(i for i in range(len(taken) + 1) if i not in taken)
    return copy


def _two_sides(names: Iterable[str], near: dict[str, set[str]]) -> dict[str, int] | None:
    """Unit -> 0 or 1, so that no two that are alive together are on one side; None: there is no such choice."""
    side: dict[str, int] = {}
    for first in names:
        if first in side:
            continue
        side[first] = 0
        reached = [first]
        for name in reached:  # it grows meanwhile
            for other in near[name]:
                if other not in side:
                    side[other] = 1 - side[name]
                    reached.append(other)
                elif side[other] == side[name]:
                    return None
    return side


def _lowest_gaps(order: Iterable[str], size: dict[str, int], near: dict[str, set[str]]) -> dict[str, int]:
    """Unit -> where it begins, if units are placed in this order."""
    start: dict[str, int] = {}
    for name in order:
        lowest = 0
        for begin, end in sorted((start[other], start[other] + size[other]) for other in near[name] if other in start):
            if lowest + size[name] <= begin:
                break
            lowest = max(lowest, end)
        start[name] = lowest
    return start


def _slots(size: dict[str, int], copy: dict[str, int]) -> dict[str, int]:
    """Unit -> where its copy begins, which is as large as the largest unit that has it."""
    slot: dict[int, int] = {}
    for name, nbytes in size.items():
        slot[copy[name]] = max(slot.get(copy[name], 0), nbytes)
    start = dict(zip(slot, accumulate(slot.values(), initial=0), strict=False))
    return {name: start[copy[name]] for name in size}

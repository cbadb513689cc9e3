"""
Place communication buffers: turn the requests of units and their overlap in time into offsets. Needs no torch.

A unit requests buckets, each of one dtype. `fixed_pool` and `max_pool` are Megatron-FSDP's (Megatron-LM pull request 5462);
`scheduled` makes use of the order of the units.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

ALIGNMENT = 256
"""Alignment of every offset in bytes."""


class Bucket(NamedTuple):
    """One buffer that a unit requests."""

    dtype: str
    nbytes: int


class UnitBuckets(NamedTuple):
    """The buckets that one unit requests at once."""

    name: str
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)


class Schedule(NamedTuple):
    """The requests to place."""

    units: Sequence[UnitBuckets]
    """The units in the order of their first requests."""
    alive: Collection[frozenset[str]]
    """Sets of units whose buckets are in use at the same time, by name; every unit is in one of the sets."""


class Plan(NamedTuple):
    """Offsets in one arena."""

    offsets: dict[str, tuple[int, ...]]
    """Unit -> the offset of each of its buckets in bytes."""
    nbytes: int
    """Bytes of the arena."""


class FixedPool(NamedTuple):
    """Bytes of a pool that serves units of one shape only."""

    pooled: int
    outside: int
    """Bytes of the units with another shape."""


def aligned(nbytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def alive_together(order: Sequence[str], most: int) -> set[frozenset[str]]:
    """Return the sets of units that are alive at the same time if each unit lives until `most` requests have followed its own."""
    return {frozenset(order[max(0, end - most) : end]) for end in range(1, len(order) + 1)}


def peak(schedule: Schedule) -> int:
    """Return the maximum bytes alive at the same time: the memory of dynamic buffers, and a lower bound for any plan."""
    size = {unit.name: unit.nbytes for unit in schedule.units}
    return max((sum(size[name] for name in together) for together in schedule.alive), default=0)


def fixed_pool(units: Sequence[UnitBuckets]) -> FixedPool:
    """Size a pool with two copies of the most common shape. Units of other shapes stay outside."""
    if not units:
        return FixedPool(0, 0)
    [(shape, _)] = Counter(unit.buckets for unit in units).most_common(1)
    outside = sum(unit.nbytes for unit in units if unit.buckets != shape)
    return FixedPool(2 * sum(bucket.nbytes for bucket in shape), outside)


def max_pool(schedule: Schedule) -> Plan:
    """
    Place units in copies of one set of slots. Units that are alive together use different copies.

    For every dtype, the set has a slot as large as the largest bucket of all units, one as large as the largest second bucket,
    and so on.
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
    Place each unit as one piece in one arena, apart from the units it is alive with.

    If the units can be split into two sides such that no two of one side are alive together, one side is placed at the bottom of
    the arena and the other at the top. The arena is then as large as the largest pair, the lower bound. Otherwise the smallest of
    three arenas is used: each unit in the lowest gap it fits into, largest units first; the same in schedule order; or the copies
    of `max_pool`, each with one slot as large as its largest unit.
    """
    size, near = {unit.name: unit.nbytes for unit in schedule.units}, _neighbours(schedule)
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
"""Value of `parallelism.buffers` -> its placement."""


def _neighbours(schedule: Schedule) -> dict[str, set[str]]:
    """Return unit -> the units that are alive together with it."""
    near: dict[str, set[str]] = defaultdict(set)
    for together in schedule.alive:
        for one, other in combinations(together, 2):
            near[one].add(other)
            near[other].add(one)
    return near


def _copies(schedule: Schedule) -> dict[str, int]:
    """Return unit -> number of its copy, the lowest that no earlier unit alive at the same time has."""
    near, copy = _neighbours(schedule), dict[str, int]()
    for unit in schedule.units:
        taken = {copy[other] for other in near[unit.name] if other in copy}
        copy[unit.name] = next(i for i in range(len(taken) + 1) if i not in taken)
    return copy


def _two_sides(names: Iterable[str], near: dict[str, set[str]]) -> dict[str, int] | None:
    """Return unit -> side 0 or 1 such that units that are alive together are on different sides; None if impossible."""
    side: dict[str, int] = {}
    for first in names:
        if first in side:
            continue
        side[first] = 0
        reached = [first]
        for name in reached:  # the list grows in the loop
            for other in near[name]:
                if other not in side:
                    side[other] = 1 - side[name]
                    reached.append(other)
                elif side[other] == side[name]:
                    return None
    return side


def _lowest_gaps(order: Iterable[str], size: dict[str, int], near: dict[str, set[str]]) -> dict[str, int]:
    """Return unit -> offset if units are placed in this order, each in the lowest gap that it fits into."""
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
    """Return unit -> offset of its copy, which is as large as the largest unit that uses it."""
    slot: dict[int, int] = {}
    for name, nbytes in size.items():
        slot[copy[name]] = max(slot.get(copy[name], 0), nbytes)
    start = dict(zip(slot, accumulate(slot.values(), initial=0), strict=False))
    return {name: start[copy[name]] for name in size}

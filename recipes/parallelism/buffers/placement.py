"""
Offsets in one arena for the communication buffers that FSDP2 requests. Requests are recorded or predicted from the wrap plan.

`fixed_pool` and `max_pool` follow Megatron-FSDP (Megatron-LM PR 5462). `scheduled` never needs more memory than `max_pool`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from meshrunner.recipes.parallelism.unit_sizes import UnitParameters
    from meshrunner.recipes.precision.base import Precision

ALIGNMENT = 256
"""Alignment of every offset, in bytes."""


class Bucket(NamedTuple):
    """The buffer that a unit requests."""

    dtype: str
    nbytes: int


class Schedule(NamedTuple):
    """The requests to place."""

    units: Mapping[str, Bucket]
    """The buffer that each unit requests. Units are in the order of their first requests."""
    alive: Collection[frozenset[str]]
    """Sets of units whose buffers are in use at the same time. Every unit is in at least one set."""


class Plan(NamedTuple):
    """The byte offset of each unit's buffer in one arena of `nbytes` bytes."""

    offsets: dict[str, int]
    nbytes: int


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def alive_together(order: Sequence[str], most: int) -> set[frozenset[str]]:
    """Return the sets of units alive at the same time: after each request in `order`, the last `most` requested units."""
    return {frozenset(order[max(0, end - most) : end]) for end in range(1, len(order) + 1)}


def peak(schedule: Schedule) -> int:
    """Return the maximum bytes alive at the same time. Dynamic buffers need this much memory, and no plan needs less."""
    return max((sum(schedule.units[name].nbytes for name in together) for together in schedule.alive), default=0)


def fixed_pool(schedule: Schedule) -> tuple[int, int]:
    """Return the bytes of two buffers of the most common shape, and the total bytes of all buffers of other shapes."""
    if not schedule.units:
        return 0, 0
    buckets = schedule.units.values()
    [(shape, _)] = Counter(buckets).most_common(1)
    return 2 * shape.nbytes, sum(bucket.nbytes for bucket in buckets if bucket != shape)


def max_pool(schedule: Schedule) -> Plan:
    """Divide the arena into equal sets of slots. A set has one slot per dtype, as large as the largest buffer of this dtype.
    Units that are alive together use different sets."""
    slots: dict[str, int] = {}
    for dtype, nbytes in schedule.units.values():
        slots[dtype] = max(slots.get(dtype, 0), nbytes)
    start = dict(zip(slots, accumulate(slots.values(), initial=0), strict=False))
    one = sum(slots.values())
    copy = _copies(schedule.units, _neighbours(schedule))
    offsets = {name: copy[name] * one + start[bucket.dtype] for name, bucket in schedule.units.items()}
    return Plan(offsets, one * (1 + max(copy.values(), default=-1)))


def scheduled(schedule: Schedule) -> Plan:
    """
    Place units in one arena, such that units that are alive together do not overlap.

    If the units can be divided into two sides so that units alive together are on different sides, one side is placed at the
    bottom of the arena and the other at the top. This is the smallest possible arena. Otherwise the smallest of three plans is
    used. (1) Units are placed from the largest to the smallest, each in the lowest gap that fits. (2) Units are placed in
    schedule order, each in the lowest gap that fits. (3) Units to which `_copies` gives the same number share a slot.
    """
    size, near = {name: bucket.nbytes for name, bucket in schedule.units.items()}, _neighbours(schedule)
    if (side := _two_sides(size, near)) is not None:
        nbytes = peak(schedule)
        return Plan({name: side[name] * (nbytes - size[name]) for name in size}, nbytes)
    descending = sorted(size, key=lambda name: -size[name])
    starts = (_lowest_gaps(descending, size, near), _lowest_gaps(size, size, near), _slots(size, _copies(size, near)))
    plans = [Plan(start, max(start[name] + size[name] for name in size)) for start in starts]
    return min(plans, key=lambda plan: plan.nbytes)


PLANS: dict[str, Callable[[Schedule], Plan]] = {"max_pool": max_pool, "scheduled": scheduled}
"""Functions that place the buffers, by value of `parallelism.buffers`."""


def _neighbours(schedule: Schedule) -> dict[str, set[str]]:
    """Return, for each unit, the other units that are alive at the same time."""
    near: dict[str, set[str]] = defaultdict(set)
    for together in schedule.alive:
        for one, other in combinations(together, 2):
            near[one].add(other)
            near[other].add(one)
    return near


def _copies(names: Iterable[str], near: dict[str, set[str]]) -> dict[str, int]:
    """Number the units in order. Neighbours in `near` get different numbers, and each unit gets the lowest free number."""
    copy: dict[str, int] = {}
    for name in names:
        taken = {copy[other] for other in near[name] if other in copy}
        copy[name] = next(i for i in range(len(taken) + 1) if i not in taken)
    return copy


def _two_sides(names: Iterable[str], near: dict[str, set[str]]) -> dict[str, int] | None:
    """Assign each unit to side 0 or 1 so that units alive together are on different sides; return None if impossible."""
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
    """Place the units in the given order, each in the lowest gap that fits. Return the offset of each unit in bytes."""
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
    """Return each unit's offset in bytes. Units with the same `copy` share a slot as large as the largest of them."""
    slot: dict[int, int] = {}
    for name, nbytes in size.items():
        slot[copy[name]] = max(slot.get(copy[name], 0), nbytes)
    start = dict(zip(slot, accumulate(slot.values(), initial=0), strict=False))
    return {name: start[copy[name]] for name in size}


class InFlight(NamedTuple):
    """Maximum number of buffers in use at the same time. The most recently requested buffers are the ones in use."""

    in_forward: int
    in_backward: int


REDUCE_SCATTER_INPUTS = InFlight(1, 1)
"""At most one input is in use, because FSDP2 releases an input before it requests the next one."""


def all_gather_outputs(prefetch: int, *, repeats: bool = False) -> InFlight:
    """
    Return the maximum number of all-gather outputs in use. prefetch: `parallelism.prefetch`; 0: torch prefetches one unit.

    In forward, FSDP2 releases the output of a unit when the next unit's output has arrived. In backward, FSDP2 releases an
    output as soon as it is copied out. repeats: whether forward calls some units several times. Such a unit is not
    prefetched: it is requested when it is called, while the prefetched outputs of other units are already in memory.
    """
    ahead, more = prefetch or 1, int(repeats and prefetch > 0)
    return InFlight(ahead + 1 + more, ahead + more)


def schedule(
    buckets: Mapping[str, Bucket], passes: Iterable[tuple[bool, Sequence[str]]], in_flight: InFlight
) -> Schedule:
    """Return the schedule of `passes`. Each pass is (whether it is a backward pass, its units in request order)."""
    alive: set[frozenset[str]] = set()
    for in_backward, order in passes:
        alive |= alive_together(order, in_flight.in_backward if in_backward else in_flight.in_forward)
    return Schedule({name: Bucket(dtype, aligned(nbytes)) for name, (dtype, nbytes) in buckets.items()}, alive)


def predicted(
    units: Mapping[str, UnitParameters], precision: Precision, shard: int, prefetch: int
) -> tuple[Schedule, Schedule]:
    """Predict the all-gather and the reduce-scatter buffers that a micro batch requests. units: in forward order."""
    import torch

    units = {name or "root": unit for name, unit in units.items()}

    def buckets(dtype: torch.dtype | None, *, frozen: bool) -> dict[str, Bucket]:
        dtype = dtype or torch.float32
        elements = {
            name: sum(each.padded(shard) for each in unit.parameters if each.trained or frozen)
            for name, unit in units.items()
        }
        return {name: Bucket(str(dtype), dtype.itemsize * count) for name, count in elements.items() if count}

    gathered = buckets(precision.param_dtype, frozen=True) if shard > 1 else {}
    in_forward = _calls({name: units[name] for name in gathered})
    in_backward = [name for name in in_forward if units[name].reshard_after_forward and not units[name].lookup][::-1]
    repeated = {name for name in gathered if units[name].calls > 1}
    passes = [(False, _requests(in_forward, repeated, prefetch)), (True, _requests(in_backward, repeated, prefetch))]
    reduced = buckets(precision.reduce_dtype, frozen=False)
    return (
        schedule(gathered, passes, all_gather_outputs(prefetch, repeats=bool(repeated))),
        schedule(reduced, [(True, [*reduced][::-1])], REDUCE_SCATTER_INPUTS),
    )


def _calls(units: Mapping[str, UnitParameters]) -> list[str]:
    """Return units in call order. A resharded unit R that is called several times follows each later unit: R, A, R, B, R."""
    order: list[str] = []
    repeated: list[str] = []
    for name, unit in units.items():
        order += [name, *repeated]
        if unit.calls > 1 and unit.reshard_after_forward:  # otherwise the unit is still unsharded
            repeated.append(name)
    return order


def _requests(order: Sequence[str], repeated: Collection[str], prefetch: int) -> list[str]:
    """Return the request order, given the call order. Each call prefetches the next `prefetch` units, skipping repeated units."""
    once = [name for name in order if name not in repeated]
    requested: list[str] = []
    for name in order:
        ahead = [] if name in repeated else once[once.index(name) + 1 :][:prefetch]
        requested += [each for each in (name, *ahead) if each in repeated or each not in requested]
    return requested

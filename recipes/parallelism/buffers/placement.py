"""Plans that give each unit's communication buffer a fixed offset in one large allocation, the arena.

A unit is a module that FSDP2 gathers as a whole. Units are *alive together* if their buffers are in use at the same time, so
these buffers must not overlap. Requests for buffers are recorded in a run's first step, or predicted from the list of units.

`fixed_pool` and `max_pool` follow Megatron-FSDP (Megatron-LM PR 5462). `scheduled` never needs more memory than `max_pool`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from meshrunner.recipes.parallelism.unit_sizes import Units
    from meshrunner.recipes.precision.base import Precision

ALIGNMENT = 256
"""Alignment of every offset, in bytes."""


class Bucket(NamedTuple):
    """The dtype and size of the buffer that a unit requests."""

    dtype: str
    nbytes: int


class Schedule(NamedTuple):
    """The buffers that need an offset, and the sets of buffers that are in use at the same time."""

    units: Mapping[str, Bucket]
    """The buffer of each unit, keyed by unit name, in the order of first requests."""
    alive: Collection[frozenset[str]]
    """Sets of units whose buffers are in use at the same time, such as {layers.0, layers.1}. Each unit is in at least one set."""


BufferSchedules = tuple[Schedule, Schedule]
"""The schedule of all-gather outputs and the schedule of reduce-scatter inputs."""


class Plan(NamedTuple):
    """The size of an arena, and the offset of each unit's buffer in the arena, in bytes."""

    offsets: dict[str, int]
    nbytes: int


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def alive_together(order: Sequence[str], most: int) -> set[frozenset[str]]:
    """Return one set per request in `order`: the units of the request and of the `most` - 1 requests before it."""
    return {frozenset(order[max(0, end - most) : end]) for end in range(1, len(order) + 1)}


def peak(schedule: Schedule) -> int:
    """Return the maximum bytes in use at the same time. Dynamic buffers need exactly this much memory, and no plan needs less."""
    return max((sum(schedule.units[name].nbytes for name in together) for together in schedule.alive), default=0)


def fixed_pool(schedule: Schedule) -> tuple[int, int]:
    """Return the bytes of two buffers of the most common shape, and the total bytes of all buffers with other shapes."""
    if not schedule.units:
        return 0, 0
    buckets = schedule.units.values()
    [(shape, _)] = Counter(buckets).most_common(1)
    return 2 * shape.nbytes, sum(bucket.nbytes for bucket in buckets if bucket != shape)


def max_pool(schedule: Schedule) -> Plan:
    """Return a plan that divides the arena into equal sets of slots. A set has one slot per dtype, which is large enough for any
    buffer of the dtype. Units whose buffers are in use at the same time use different sets."""
    start, one = _slots(schedule.units)
    copy = _copies(schedule.units, _neighbours(schedule))
    return Plan({name: copy[name] * one + start[name] for name in start}, one * (1 + max(copy.values(), default=-1)))


def scheduled(schedule: Schedule) -> Plan:
    """Return a plan with a small arena.

    If possible, the units are split into two sides, such as even and odd layers, so that no two buffers of a side are in use at
    the same time. The buffers of one side begin at the bottom of the arena, and those of the other side end at the top. This
    arena is the smallest possible. If two sides are impossible, return the smallest of three plans. (1) Put each unit into the
    lowest gap, largest first. (2) Do the same in schedule order. (3) Let units with equal numbers from `_copies` share a slot.
    """
    size, near = {name: bucket.nbytes for name, bucket in schedule.units.items()}, _neighbours(schedule)
    copy = _copies(size, near)
    # Each unit is requested after one of its neighbours. Therefore, if two sides exist, `_copies` numbers them 0 and 1.
    if max(copy.values(), default=0) < 2:
        nbytes = peak(schedule)
        return Plan({name: copy[name] * (nbytes - size[name]) for name in size}, nbytes)
    plans = [_lowest_gaps(order, size, near) for order in (sorted(size, key=lambda name: -size[name]), size)]
    plans.append(_slots({name: (number, size[name]) for name, number in copy.items()}))
    return min(plans, key=lambda plan: plan.nbytes)


PLANS: dict[str, Callable[[Schedule], Plan]] = {"max_pool": max_pool, "scheduled": scheduled}
"""Planning functions, keyed by the value of `parallelism.buffers` that selects them."""


def _neighbours(schedule: Schedule) -> dict[str, set[str]]:
    near: dict[str, set[str]] = defaultdict(set)
    for together in schedule.alive:
        for one, other in combinations(together, 2):
            near[one].add(other)
            near[other].add(one)
    return near


def _copies(names: Iterable[str], near: dict[str, set[str]]) -> dict[str, int]:
    """Give each unit the lowest number, counted from 0, that none of its neighbours in `near` has yet."""
    copy: dict[str, int] = {}
    for name in names:
        taken = {copy[other] for other in near[name] if other in copy}
        copy[name] = next(i for i in range(len(taken) + 1) if i not in taken)
    return copy


def _lowest_gaps(order: Iterable[str], size: dict[str, int], near: dict[str, set[str]]) -> Plan:
    start: dict[str, int] = {}
    for name in order:
        lowest = 0
        for begin, end in sorted((start[other], start[other] + size[other]) for other in near[name] if other in start):
            if lowest + size[name] <= begin:
                break
            lowest = max(lowest, end)
        start[name] = lowest
    return Plan(start, max(start[name] + size[name] for name in start))


def _slots(units: Mapping[str, tuple[Hashable, int]]) -> Plan:
    """Return a plan in which units with equal keys share one slot, sized for the largest of these units. units: (key, bytes)."""
    slot: dict[Hashable, int] = {}
    for key, nbytes in units.values():
        slot[key] = max(slot.get(key, 0), nbytes)
    start = dict(zip(slot, accumulate(slot.values(), initial=0), strict=False))
    return Plan({name: start[key] for name, (key, _) in units.items()}, sum(slot.values()))


class InFlight(NamedTuple):
    """Maximum number of buffers in use at the same time. A request beyond the maximum first releases the oldest buffer."""

    in_forward: int
    in_backward: int


REDUCE_SCATTER_INPUTS = InFlight(1, 1)
"""Limit for reduce-scatter inputs: only one input is in use, because FSDP2 releases an input before requesting the next."""


def all_gather_outputs(prefetch: int, *, repeats: bool = False) -> InFlight:
    """Return the maximum numbers of all-gather outputs in use. prefetch: `parallelism.prefetch`; torch prefetches 1 if it is 0.

    In backward, FSDP2 releases an output as soon as the output is copied. In forward, FSDP2 keeps an output until the next output
    has arrived, so one more output is in use. repeats: whether forward calls some units several times. Such units are not
    prefetched, so the output of one such unit is in use in addition to the prefetched outputs of other units.
    """
    ahead, more = prefetch or 1, int(repeats and prefetch > 0)
    return InFlight(ahead + 1 + more, ahead + more)


def schedule(
    buckets: Mapping[str, Bucket], passes: Iterable[tuple[bool, Sequence[str]]], in_flight: InFlight
) -> Schedule:
    """Return the schedule of several passes. A pass is a pair: (whether the pass is backward, units in the order of requests)."""
    alive: set[frozenset[str]] = set()
    for in_backward, order in passes:
        alive |= alive_together(order, in_flight.in_backward if in_backward else in_flight.in_forward)
    return Schedule({name: Bucket(dtype, aligned(nbytes)) for name, (dtype, nbytes) in buckets.items()}, alive)


def predicted(units: Units, precision: Precision, shard: int, prefetch: int) -> BufferSchedules:
    """Predict the schedules for one micro batch."""
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


def _calls(units: Units) -> list[str]:
    """Return the units in the order in which forward gathers them, such as R, A, R, B, R for a resharded R called three times."""
    order: list[str] = []
    repeated: list[str] = []
    for name, unit in units.items():
        order += [name, *repeated]
        if unit.calls > 1 and unit.reshard_after_forward:  # otherwise the unit is still unsharded
            repeated.append(name)
    return order


def _requests(order: Sequence[str], repeated: Collection[str], prefetch: int) -> list[str]:
    """Convert call order to request order. A unit in `repeated` requests only its own buffer. Any other unit also requests the
    buffers of the next `prefetch` units that are not in `repeated`. Each unit outside `repeated` is requested once."""
    once = [name for name in order if name not in repeated]
    requested: list[str] = []
    for name in order:
        ahead = [] if name in repeated else once[once.index(name) + 1 :][:prefetch]
        requested += [each for each in (name, *ahead) if each in repeated or each not in requested]
    return requested

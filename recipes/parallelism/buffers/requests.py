"""FSDP2's requests for buffers and their time in flight, from recorded requests or predicted from the wrap plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshrunner.recipes.parallelism.buffers.placement import Bucket, Schedule, aligned, alive_together

if TYPE_CHECKING:
    import torch

    from meshrunner.recipes.parallelism.unit_sizes import UnitParameters
    from meshrunner.recipes.precision.base import Precision


class InFlight(NamedTuple):
    """The most buffers in use at a time, which are always those requested last."""

    in_forward: int
    in_backward: int


REDUCE_SCATTER_INPUTS = InFlight(1, 1)
"""FSDP2 releases one input before it requests the next."""


def all_gather_outputs(prefetch: int, *, repeats: bool = False) -> InFlight:
    """
    Return the number of all-gather outputs in use with `parallelism.prefetch`, of which 0 is torch's default: one unit ahead.

    In forward FSDP2 releases the output of a unit when that of the next unit has arrived, in backward when it is copied out.
    Units that forward calls several times (`repeats`) are not prefetched: they are requested while prefetched outputs wait.
    """
    ahead, more = prefetch or 1, int(repeats and prefetch > 0)
    return InFlight(ahead + 1 + more, ahead + more)


def schedule(
    buckets: Mapping[str, Bucket], passes: Iterable[tuple[bool, Sequence[str]]], in_flight: InFlight
) -> Schedule:
    """Return the schedule of passes, each given as whether it is a backward and its units in the order of their requests."""
    alive: set[frozenset[str]] = set()
    for in_backward, order in passes:
        alive |= alive_together(order, in_flight.in_backward if in_backward else in_flight.in_forward)
    return Schedule({name: Bucket(dtype, aligned(nbytes)) for name, (dtype, nbytes) in buckets.items()}, alive)


def predicted(
    units: Mapping[str, UnitParameters], precision: Precision, shard: int, prefetch: int
) -> tuple[Schedule, Schedule]:
    """
    Predict the requests of a micro batch: all-gathers of all parameters of a unit, reduce-scatters of the trained ones.

    The units are in the order of forward. With `shard` 1 nothing is gathered.
    """
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
    """Return the units in call order. A unit called several times, such as the output projection, follows each later unit."""
    order: list[str] = []
    repeated: list[str] = []
    for name, unit in units.items():
        order += [name, *repeated]
        if unit.calls > 1 and unit.reshard_after_forward:  # otherwise it is still unsharded
            repeated.append(name)
    return order


def _requests(order: Sequence[str], repeated: Collection[str], prefetch: int) -> list[str]:
    """Return the units in request order, given the call order: each call prefetches the next units, except repeated ones."""
    once = [name for name in order if name not in repeated]
    requested: list[str] = []
    for name in order:
        ahead = [] if name in repeated else once[once.index(name) + 1 :][:prefetch]
        requested += [each for each in (name, *ahead) if each in repeated or each not in requested]
    return requested

"""What FSDP2 asks for, and how long it keeps it: from requests that were recorded, or predicted from the wrap plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshrunner.recipes.parallelism.buffers.plan import Bucket, Schedule, Unit, aligned, alive_together
from meshrunner.recipes.parallelism.shards import padded

if TYPE_CHECKING:
    import torch

    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters
    from meshrunner.recipes.precision import Precision

Pass = tuple[bool, Sequence[str]]
"""Whether it is a backward, and the units in the order in which they ask."""


class Kept(NamedTuple):
    """How many buffers are alive at most: those that were asked for last."""

    in_forward: int
    in_backward: int


INPUTS_OF_REDUCTIONS = Kept(1, 1)
"""FSDP2 lets go of one before it asks for the next."""


def outputs_of_gathers(ahead: int) -> Kept:
    """
    In forward FSDP2 keeps that of a unit until the next one's has arrived, in backward only until it is copied out.

    Args:
        ahead: units that are gathered ahead of the current one.
    """
    return Kept(ahead + 1, ahead)


def schedule(sizes: Mapping[str, Bucket], passes: Iterable[Pass], kept: Kept) -> Schedule:
    """What each unit asks for, in the order in which they ask first, and what is alive together."""
    units = [Unit(name, (bucket._replace(nbytes=aligned(bucket.nbytes)),)) for name, bucket in sizes.items()]
    alive: set[frozenset[str]] = set()
    for in_backward, order in passes:
        alive |= alive_together(order, kept.in_backward if in_backward else kept.in_forward)
    return Schedule(units, alive)


def predicted(
    units: Mapping[str, UnitParameters], precision: Precision, shard: int, ahead: int
) -> tuple[Schedule, Schedule]:
    """
    The all-gathers and the reductions of a micro batch: one buffer for all parameters of a unit, or for those that are trained.

    Args:
        units: in the order of forward.
        shard: devices that each parameter is sharded over; 1: there is nothing to gather.
        ahead: units that are gathered ahead of the current one.
    """
    import torch

    units = {name or "root": unit for name, unit in units.items()}

    def sizes(dtype: torch.dtype | None, *, frozen: bool) -> dict[str, Bucket]:
        dtype = dtype or torch.float32
        elements = {
            name: sum(padded(each, shard) for each in unit.parameters if each.trained or frozen)
            for name, unit in units.items()
        }
        return {name: Bucket(str(dtype), dtype.itemsize * count) for name, count in elements.items() if count}

    gathered = sizes(precision.param_dtype, frozen=True) if shard > 1 else {}
    order = _calls({name: units[name] for name in gathered})
    again = [name for name in order if units[name].reshard_after_forward and not units[name].lookup]
    reduced = sizes(precision.reduce_dtype, frozen=False)
    return (
        schedule(gathered, [(False, order), (True, again[::-1])], outputs_of_gathers(ahead)),
        schedule(reduced, [(True, [*reduced][::-1])], INPUTS_OF_REDUCTIONS),
    )


def _calls(units: Mapping[str, UnitParameters]) -> list[str]:
    """The units as forward calls them: what it calls several times, such as the output projection, behind each further unit."""
    order: list[str] = []
    repeated: list[str] = []
    for name, unit in units.items():
        order += [name, *repeated]
        if unit.calls > 1:
            repeated.append(name)
    return order

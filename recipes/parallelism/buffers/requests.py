"""What FSDP2 asks for, and how long it keeps it: from requests that were recorded, or predicted from the wrap plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshrunner.recipes.parallelism.buffers.plan import Bucket, Schedule, Unit, aligned, alive_together
from meshrunner.recipes.parallelism.shards import padded

if TYPE_CHECKING:
    import torch

    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters
    from meshrunner.recipes.precision.base import Precision

Pass = tuple[bool, Sequence[str]]
"""Whether it is a backward, and the units in the order in which they ask."""


class Kept(NamedTuple):
    """How many buffers are alive at most: those that were asked for last."""

    in_forward: int
    in_backward: int


INPUTS_OF_REDUCTIONS = Kept(1, 1)
"""FSDP2 lets go of one before it asks for the next."""


def outputs_of_gathers(prefetch: int, *, repeats: bool = False) -> Kept:
    """
    In forward FSDP2 keeps that of a unit until the next one's has arrived, in backward only until it is copied out.

    Args:
        prefetch: units that are gathered ahead of the current one; 0: torch's default, which is one.
        repeats: whether there are units that forward calls several times: then they are not prefetched, and asked for while
            those that are prefetched wait.
    """
    ahead, more = prefetch or 1, int(repeats and prefetch > 0)
    return Kept(ahead + 1 + more, ahead + more)


def schedule(sizes: Mapping[str, Bucket], passes: Iterable[Pass], kept: Kept) -> Schedule:
    """What each unit asks for, in the order in which they ask first, and what is alive together."""
    units = [Unit(name, (bucket._replace(nbytes=aligned(bucket.nbytes)),)) for name, bucket in sizes.items()]
    alive: set[frozenset[str]] = set()
    for in_backward, order in passes:
        alive |= alive_together(order, kept.in_backward if in_backward else kept.in_forward)
    return Schedule(units, alive)


def predicted(
    units: Mapping[str, UnitParameters], precision: Precision, shard: int, prefetch: int
) -> tuple[Schedule, Schedule]:
    """
    The all-gathers and the reductions of a micro batch: one buffer for all parameters of a unit, or for those that are trained.

    Args:
        units: in the order of forward.
        shard: devices that each parameter is sharded over; 1: there is nothing to gather.
        prefetch: as of `outputs_of_gathers`.
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
    called = _calls({name: units[name] for name in gathered})
    again = [name for name in called if units[name].reshard_after_forward and not units[name].lookup]
    repeated = {name for name in gathered if units[name].calls > 1}
    passes = [
        (backward, _asked(order, repeated, prefetch)) for backward, order in ((False, called), (True, again[::-1]))
    ]
    reduced = sizes(precision.reduce_dtype, frozen=False)
    return (
        schedule(gathered, passes, outputs_of_gathers(prefetch, repeats=bool(repeated))),
        schedule(reduced, [(True, [*reduced][::-1])], INPUTS_OF_REDUCTIONS),
    )


def _calls(units: Mapping[str, UnitParameters]) -> list[str]:
    """The units as forward calls them: what it calls several times, such as the output projection, behind each further unit."""
    order: list[str] = []
    repeated: list[str] = []
    for name, unit in units.items():
        order += [name, *repeated]
        if unit.calls > 1 and unit.reshard_after_forward:  # else it is still there
            repeated.append(name)
    return order


def _asked(order: Sequence[str], repeated: Collection[str], prefetch: int) -> list[str]:
    """The units as they ask, if they are called in this order: each has the next ones ask, but for those that are repeated."""
    once = [name for name in order if name not in repeated]
    asked: list[str] = []
    for name in order:
        ahead = [] if name in repeated else once[once.index(name) + 1 :][:prefetch]
        asked += [each for each in (name, *ahead) if each in repeated or each not in asked]
    return asked

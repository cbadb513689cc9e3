"""What blocks keep for backward, from a rehearsal."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from meshrunner.runner.ledger.memory_ledger import UNKNOWN, Allocation
from meshrunner.runner.predict.trace.tracer import Trace


class Kept(NamedTuple):
    """
    What a block's forward of one micro batch leaves alive on a device until backward, in addition to its input and output.

    Gathered parameters are not in it.
    """

    nbytes: int
    operators: dict[str, tuple[int, int]]
    """Operator, such as `mm` -> (results kept, results that had memory), of those with any result that is kept."""


def kept_by_block(rehearsal: Trace) -> dict[int, Kept]:
    """Index of a block -> what it keeps. Empty where the whole model is compiled: then phases have no blocks."""
    made, backward = _made_in_forward(rehearsal)
    return {block: _kept(each, backward) for block, each in made.items()}


def most_added(rehearsal: Trace) -> int | None:
    """Bytes that the block that keeps most adds to memory: its output, the next block's input, included. None: see above."""
    made, backward = _made_in_forward(rehearsal)
    return max(
        (sum(allocation.nbytes for allocation in _alive(each, backward)) for each in made.values()), default=None
    )


def _made_in_forward(rehearsal: Trace) -> tuple[dict[int, list[Allocation]], int]:
    """What the forward of each block makes of the last step's first micro batch; when its backward begins."""
    last, allocations = rehearsal.last_step, rehearsal.ledger.allocations
    allocated_at = (
        allocation.allocated_at
        for allocation in allocations
        if (allocation.phase.step, allocation.phase.part) == (last, "backward")
    )
    backward = next(allocated_at, rehearsal.ledger.now)
    made: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        step, part, block = allocation.phase
        if (step, part) != (last, "forward") or block is None or allocation.allocated_at > backward:
            continue
        # Not yet freed, what a function with a backward of its own makes is temporary: see `Account`.
        if allocation.category in UNKNOWN and allocation.nbytes:
            made[block].append(allocation)
    return made, backward


def _alive(made: list[Allocation], until: int) -> list[Allocation]:
    return [allocation for allocation in made if allocation.freed_at is None or allocation.freed_at > until]


def _kept(made: list[Allocation], until: int) -> Kept:
    alive = [allocation for allocation in _alive(made, until) if not allocation.is_block_output]
    total, kept = (
        Counter(allocation.operator for allocation in made),
        Counter(allocation.operator for allocation in alive),
    )
    operators = {_short(name): (kept[name], total[name]) for name in sorted(kept)}
    return Kept(sum(allocation.nbytes for allocation in alive), operators)


def _short(name: str) -> str:
    """`mm` of `aten::mm`; others as in `activation_checkpoint.save`: `_c10d_functional.all_to_all_single`."""
    return name.replace("::", ".").removeprefix("aten.")

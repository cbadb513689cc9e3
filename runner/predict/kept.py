"""What blocks keep for backward, from a rehearsal."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from meshrunner.runner.ledger.account import UNKNOWN, Life
from meshrunner.runner.predict.trace.tracer import Rehearsal


class Kept(NamedTuple):
    """
    What a block's forward of one micro batch leaves alive on a device until backward, in addition to its input and output.

    Gathered parameters are not in it.
    """

    nbytes: int
    operators: dict[str, tuple[int, int]]
    """Operator, such as `mm` -> (results kept, results that had memory), of those with any result that is kept."""


def kept_by_block(rehearsal: Rehearsal) -> dict[int, Kept]:
    """Index of a block -> what it keeps. Empty where the whole model is compiled: then phases have no blocks."""
    made, backward = _made_in_forward(rehearsal)
    return {block: _kept(each, backward) for block, each in made.items()}


def most_added(rehearsal: Rehearsal) -> int | None:
    """Bytes that the block that keeps most adds to memory: its output, the next block's input, included. None: see above."""
    made, backward = _made_in_forward(rehearsal)
    return max((sum(life.nbytes for life in _alive(each, backward)) for each in made.values()), default=None)


def _made_in_forward(rehearsal: Rehearsal) -> tuple[dict[int, list[Life]], int]:
    """What the forward of each block makes of the last step's first micro batch; when its backward begins."""
    last, lives = rehearsal.last_step, rehearsal.account.lives
    born = (life.born for life in lives if (life.phase.step, life.phase.part) == (last, "backward"))
    backward = next(born, rehearsal.account.now)
    made: dict[int, list[Life]] = defaultdict(list)
    for life in lives:
        step, part, block = life.phase
        if (step, part) != (last, "forward") or block is None or life.born > backward:
            continue
        # Not yet freed, what a function with a backward of its own makes is temporary: see `Account`.
        if life.category in UNKNOWN and life.nbytes:
            made[block].append(life)
    return made, backward


def _alive(made: list[Life], until: int) -> list[Life]:
    return [life for life in made if life.died is None or life.died > until]


def _kept(made: list[Life], until: int) -> Kept:
    alive = [life for life in _alive(made, until) if not life.ends_block]
    total, kept = Counter(life.operator for life in made), Counter(life.operator for life in alive)
    operators = {_short(name): (kept[name], total[name]) for name in sorted(kept)}
    return Kept(sum(life.nbytes for life in alive), operators)


def _short(name: str) -> str:
    """`mm` of `aten::mm`; others as in `activation_checkpoint.save`: `_c10d_functional.all_to_all_single`."""
    return name.replace("::", ".").removeprefix("aten.")

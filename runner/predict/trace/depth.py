"""
Memory and time at full depth from two shallow rehearsals.

Blocks are alike, so whatever a step holds at a block is linear in the depth, as seen from either end of the model: for each
position the two depths give the line. (For a whole phase it is not: where in backward the peak lies changes with the depth.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from meshrunner.recipes.parallelism.wrap_policy import Rules
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.ledger.memory_ledger import MemoryLedger, PeakMemory
from meshrunner.runner.ledger.phases import START, Phase
from meshrunner.runner.predict.trace.tracer import Trace

LONGEST_PERIOD = 8
ANY_DEPTH = ("blocks", "size", "root_only", "rules")
"""Kinds of `wrap` whose plan names no single block, but for patterns of rules."""
SINGLE = re.compile(r"[\d?[]")
"""In patterns that may mean single blocks: `layers.1.*`, `layers.?`, `layers.[ab]`."""


class Depths(NamedTuple):
    """Of two rehearsals that tell what a third would."""

    shallow: int
    deeper: int
    full: int
    front: int
    """First blocks whose peaks are looked at; in between, the ends bound them."""
    reach: int
    """Last blocks whose peaks are looked at."""

    def line(self, shallow: int, deeper: int) -> int:
        """The value at full depth of what has these values."""
        return deeper + (self.full - self.deeper) * (deeper - shallow) // (self.deeper - self.shallow)


def shallow_depths(recipe: Recipe, blocks: int) -> Depths | None:
    """Two depths that tell all of `blocks`; None: only the full depth does."""
    model = recipe.model
    if blocks_may_differ(recipe) or _blocks_are_joined(recipe) or model.at_depth(blocks) is None:
        return None
    recomputes = [recipe.activation_checkpoint.recomputes(block) for block in range(blocks)]
    period = next((p for p in range(1, LONGEST_PERIOD + 1) if recomputes[p:] == recomputes[:-p]), None)
    if period is None:
        return None
    # What is gathered ahead is at the ends of the model not yet, or no longer, there.
    reach = max(2, recipe.parallelism.units_ahead + 1) * period
    front = model.first_blocks + reach
    shallow = front + reach - 1
    shallow += (blocks - shallow) % period
    return Depths(shallow, shallow + period, blocks, front, reach) if shallow + period < blocks else None


def blocks_may_differ(recipe: Recipe) -> bool:
    """Whether single blocks may be frozen, wrapped or distributed in a way of their own."""
    patterns = list(recipe.model.freeze)
    if isinstance(recipe.wrap, Rules):
        patterns += [rule.match for rule in recipe.wrap.rules]
    layout = recipe.parallelism
    unknown = recipe.wrap.kind not in ANY_DEPTH or layout.kind not in layout.kinds
    return unknown or any(map(SINGLE.search, patterns))


def _blocks_are_joined(recipe: Recipe) -> bool:
    """Whether what spans blocks is no multiple of them: one graph, DDP's buckets, the padding of FSDP1's flat parameter."""
    layout = recipe.parallelism.kind
    joined = layout == "ddp" or (layout == "fsdp1" and recipe.wrap.kind in ("size", "root_only"))
    return joined or recipe.compile.kind not in ("eager", "per_block")


class Deep(NamedTuple):
    """What the two rehearsals say of the full depth."""

    start: int
    """Most bytes before the first step."""
    peak: PeakMemory
    """Of a step."""


def extrapolate(depths: Depths, shallow: Trace, deeper: Trace) -> Deep:
    """Memory at full depth, to the byte."""
    of_shallow, of_deeper = _positions(shallow, depths.shallow, depths), _positions(deeper, depths.deeper, depths)
    totals = {
        position: depths.line(of_shallow[position][1], total)
        for position, (_, total) in of_deeper.items()
        if position in of_shallow
    }
    highest = max(totals, key=totals.__getitem__)
    phases = of_shallow[highest][0], of_deeper[highest][0]
    parts = [_peak_in(each.ledger, phase).by_category for each, phase in zip((shallow, deeper), phases, strict=True)]
    by_category = {name: depths.line(parts[0][name], parts[1][name]) for name in parts[0]}
    part, block = highest
    number = None if block is None else block % depths.full
    return Deep(
        depths.line(start_peak(shallow), start_peak(deeper)),
        PeakMemory(totals[highest], by_category, Phase(deeper.last_step, part, number)),
    )


def start_peak(rehearsal: Trace) -> int:
    """Most bytes before the first step, when whole parameters are drawn."""
    return rehearsal.ledger.peak_of(lambda phase: phase.part == START).total


def step_peak(rehearsal: Trace) -> PeakMemory:
    """Of a step that is like all that follow."""
    return rehearsal.ledger.peak_of(lambda phase: phase.step == rehearsal.last_step)


def _peak_in(ledger: MemoryLedger, phase: Phase) -> PeakMemory:
    return ledger.peak_of(lambda each: each == phase)


def _positions(rehearsal: Trace, depth: int, depths: Depths) -> dict[tuple[str, int | None], tuple[Phase, int]]:
    """(part of the last step, block from the nearer end: -1 is the last) -> that phase and its peak."""
    found: dict[tuple[str, int | None], tuple[Phase, int]] = {}
    for phase, total in rehearsal.ledger.peaks().items():
        if phase.step != rehearsal.last_step:
            continue
        if phase.block is None:
            found[phase.part, None] = phase, total
            continue
        if phase.block < depths.front:
            found[phase.part, phase.block] = phase, total
        if depth - phase.block <= depths.reach:
            found[phase.part, phase.block - depth] = phase, total
    return found


def trace_shallow(depths: Depths, recipe: Recipe, trace_recipe: Callable[[Recipe], Trace]) -> tuple[Trace, Trace]:
    """The two rehearsals."""

    def at(blocks: int) -> Trace:
        model = recipe.model.at_depth(blocks)
        assert model is not None
        return trace_recipe(recipe.model_copy(update={"model": model}))

    return at(depths.shallow), at(depths.deeper)

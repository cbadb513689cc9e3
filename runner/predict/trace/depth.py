"""
Extrapolates memory to the full depth of a model from traces of two shallow models.

Blocks are alike. So the memory held at the n-th block from the front, or from the end, is linear in the depth of the model.
The peak over all blocks is not linear in the depth, because the block at which memory peaks in backward changes with the depth.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from meshrunner.recipes.parallelism.wrap_policy import Rules
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.ledger.allocations import START, PeakMemory, Phase
from meshrunner.runner.predict.trace.tracer import Trace

LONGEST_PERIOD = 8
ANY_DEPTH = ("blocks", "size", "root_only", "rules")
"""Kinds of `wrap` that treat all blocks alike, unless the patterns of `rules` match single blocks."""
SINGLE = re.compile(r"[\d?[]")
"""Characters of a pattern that can match single blocks: `layers.1.*`, `layers.?`, `layers.[ab]`."""


class Depths(NamedTuple):
    """Two shallow depths from which the full depth is extrapolated."""

    shallow: int
    deeper: int
    full: int
    front: int
    """Number of blocks at the front of the model whose peaks are extrapolated."""
    reach: int
    """Number of blocks at the end of the model whose peaks are extrapolated. No block between front and end peaks higher."""

    def at_full_depth(self, shallow: int, deeper: int) -> int:
        """Extrapolate a value linearly to the full depth, given the value at both shallow depths."""
        return deeper + (self.full - self.deeper) * (deeper - shallow) // (self.deeper - self.shallow)


def shallow_depths(recipe: Recipe, blocks: int) -> Depths | None:
    """Return two depths from which the memory at depth `blocks` can be extrapolated, or None if the full depth must be traced."""
    model = recipe.model
    layout = recipe.parallelism.kind
    # Memory is not linear in the depth if a graph, a DDP bucket or a padded flat parameter spans several blocks.
    joined = layout == "ddp" or (layout == "fsdp1" and recipe.wrap.kind in ("size", "root_only"))
    joined = joined or recipe.compile.kind not in ("eager", "per_block")
    if joined or blocks_may_differ(recipe) or model.at_depth(blocks) is None:
        return None
    recomputes = [recipe.activation_checkpoint.recomputes(block) for block in range(blocks)]
    period = next((p for p in range(1, LONGEST_PERIOD + 1) if recomputes[p:] == recomputes[:-p]), None)
    if period is None:
        return None
    # Near the first and last block, fewer blocks are gathered ahead of time than elsewhere.
    reach = max(2, recipe.parallelism.units_ahead + 1) * period
    front = model.first_blocks + reach
    shallow = front + reach - 1
    shallow += (blocks - shallow) % period
    return Depths(shallow, shallow + period, blocks, front, reach) if shallow + period < blocks else None


def blocks_may_differ(recipe: Recipe) -> bool:
    """Whether some blocks may be frozen, wrapped or distributed differently from other blocks."""
    patterns = list(recipe.model.freeze)
    if isinstance(recipe.wrap, Rules):
        patterns += [rule.match for rule in recipe.wrap.rules]
    layout = recipe.parallelism
    unknown = recipe.wrap.kind not in ANY_DEPTH or layout.kind not in layout.kinds
    return unknown or any(map(SINGLE.search, patterns))


def at_depth(recipe: Recipe, blocks: int) -> Recipe:
    """Return the recipe with a model of fewer blocks. `blocks` must be a depth that `shallow_depths` returned."""
    model = recipe.model.at_depth(blocks)
    assert model is not None
    return recipe.model_copy(update={"model": model})


def extrapolate(depths: Depths, shallow: Trace, deeper: Trace) -> tuple[int, PeakMemory]:
    """Return two values for the full depth, exact to the byte: the peak bytes before the first step, and the peak of a step."""
    in_shallow, in_deeper = _positions(shallow, depths.shallow, depths), _positions(deeper, depths.deeper, depths)
    totals = {
        position: depths.at_full_depth(in_shallow[position][1], total)
        for position, (_, total) in in_deeper.items()
        if position in in_shallow
    }
    highest = max(totals, key=totals.__getitem__)
    phases = in_shallow[highest][0], in_deeper[highest][0]
    first = shallow.ledger.peak_of(lambda phase: phase == phases[0]).by_category
    second = deeper.ledger.peak_of(lambda phase: phase == phases[1]).by_category
    by_category = {name: depths.at_full_depth(first[name], second[name]) for name in first}
    part, block = highest
    number = None if block is None else block % depths.full
    start = depths.at_full_depth(start_peak(shallow), start_peak(deeper))
    return start, PeakMemory(totals[highest], by_category, Phase(deeper.last_step, part, number))


def start_peak(trace: Trace) -> int:
    """Return the peak bytes before the first step, while parameters are initialised whole (unsharded)."""
    return trace.ledger.peak_of(lambda phase: phase.part == START).total


def step_peak(trace: Trace) -> PeakMemory:
    """Return the peak of the last traced step. Later steps have the same peak."""
    return trace.ledger.peak_of(lambda phase: phase.step == trace.last_step)


def _positions(trace: Trace, depth: int, depths: Depths) -> dict[tuple[str, int | None], tuple[Phase, int]]:
    """Map (part of the last step, block) to (phase, peak bytes). The first block is 0 and the last is -1, as in a Python list."""
    found: dict[tuple[str, int | None], tuple[Phase, int]] = {}
    for phase, total in trace.ledger.peaks().items():
        step, part, block = phase
        if step != trace.last_step:
            continue
        if block is None or block < depths.front:
            found[part, block] = phase, total
        if block is not None and depth - block <= depths.reach:
            found[part, block - depth] = phase, total
    return found

"""Extrapolates the memory peak of a model from traces of two shallow models: copies of the model with fewer blocks.

The depth of a model is its number of blocks. If all blocks are alike, the memory peak within the nth block from the front or
from the end is linear in the depth. The peak over all blocks is not linear, because a deeper model may peak in another block.
"""

import re
from typing import NamedTuple, TypeVar

from meshrunner.recipes.parallelism.wrap_policy import Rules
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.ledger.allocations import START, PeakMemory, Phase
from meshrunner.runner.predict.trace.tracer import Trace

Value = TypeVar("Value", int, float)

LONGEST_PERIOD = 8
ANY_DEPTH = ("blocks", "size", "root_only", "rules")
"""Values of `wrap.kind` that treat all blocks alike. `rules` treats them alike only if no pattern matches individual blocks."""
SINGLE = re.compile(r"[\d?[]")
"""Characters that occur only in name patterns for individual blocks, such as `layers.1.*`, `layers.?` or `layers.[ab]`."""


class Depths(NamedTuple):
    """Depths `shallow` and `deeper` of the two traced models, from which memory at the depth `full` is extrapolated."""

    shallow: int
    deeper: int
    full: int
    front: int
    """Number of blocks at the front whose peaks are extrapolated from the peaks of the same blocks in both traced models."""
    reach: int
    """Number of blocks at the end whose peaks are extrapolated. The other blocks never have the highest peak."""

    def at_full_depth(self, shallow: Value, deeper: Value) -> Value:
        """Extrapolate a value linearly to the full depth, given its values at the depths `shallow` and `deeper`."""
        periods = (self.full - self.deeper) // (self.deeper - self.shallow)  # `shallow_depths` avoids a remainder
        return deeper + periods * (deeper - shallow)


def shallow_depths(recipe: Recipe, blocks: int) -> Depths | None:
    """Return the depths to trace for a model with `blocks` blocks, or None if the full model must be traced."""
    model = recipe.model
    layout = recipe.parallelism.kind
    # Memory is not linear in the depth if a compiled graph, a DDP bucket or a padded flat parameter spans several blocks.
    joined = layout == "ddp" or (layout == "fsdp1" and recipe.wrap.kind in ("size", "root_only"))
    joined = joined or recipe.compile.kind not in ("eager", "per_block") or recipe.parallelism.pipeline > 1
    if joined or blocks_may_differ(recipe) or model.at_depth(blocks) is None:
        return None
    recomputes = [recipe.activation_checkpoint.recomputes(block) for block in range(blocks)]
    period = next((p for p in range(1, LONGEST_PERIOD + 1) if recomputes[p:] == recomputes[:-p]), None)
    if period is None:
        return None
    # Near the first and last block, fewer blocks are prefetched (all-gathered ahead of time).
    reach = max(2, recipe.parallelism.units_ahead + 1) * period
    front = model.first_blocks + reach
    shallow = front + reach - 1
    shallow += (blocks - shallow) % period
    return Depths(shallow, shallow + period, blocks, front, reach) if shallow + period < blocks else None


def blocks_may_differ(recipe: Recipe) -> bool:
    """Return whether some blocks may be frozen, wrapped or distributed differently from other blocks."""
    patterns = list(recipe.model.freeze)
    if isinstance(recipe.wrap, Rules):
        patterns += [rule.match for rule in recipe.wrap.rules]
    layout = recipe.parallelism
    unknown = recipe.wrap.kind not in ANY_DEPTH or layout.kind not in layout.kinds
    return unknown or any(map(SINGLE.search, patterns))


def extrapolate(depths: Depths, shallow: Trace, deeper: Trace) -> tuple[int, PeakMemory]:
    """Return the peak bytes before the first step, and the peak within a step, at full depth. The peaks are exact to the byte."""
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
    """Return the peak bytes before the first step, while parameters are initialised unsharded."""
    return trace.ledger.peak_of(lambda phase: phase.part == START).total


def step_peak(trace: Trace) -> PeakMemory:
    """Return the memory peak of the last traced step, which is also the peak of every later step."""
    return trace.ledger.peak_of(lambda phase: phase.step == trace.last_step)


def _positions(trace: Trace, depth: int, depths: Depths) -> dict[tuple[str, int | None], tuple[Phase, int]]:
    """Return (phase, peak bytes) in the last step, keyed by (part, block). Blocks at the end have negative block numbers."""
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

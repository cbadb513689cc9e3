"""Pipeline schedules, and the stages (consecutive blocks) that each rank holds."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple


class Schedule(NamedTuple):
    """An order of the forward and backward passes of micro batches."""

    torch_name: str
    stages: int
    """Default number of stages per rank."""
    any_stages: bool = False
    """Whether a rank can have a number of stages other than the default."""
    is_v: bool = False
    """Whether a rank holds one stage of the first half and the mirrored stage of the second half. Otherwise, the stages of a
    rank are `pipeline` stages apart."""
    splits_backward: bool = False
    """Whether the gradients of weights are computed later than those of activations, to fill idle time."""
    fills: bool = False
    """Whether there must be at least as many micro batches as stages."""
    in_rounds: bool = False
    """Whether the number of rounds (micro batches / pipeline, rounded down) must divide the number of micro batches."""

    def stages_of(self, rank: int, ranks: int, per_rank: int) -> list[int]:
        """Return the numbers of a rank's stages, in the order of the model."""
        if self.is_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * turn for turn in range(per_rank)]


SCHEDULES = {
    "gpipe": Schedule("GPipe", stages=1),
    "1f1b": Schedule("1F1B", stages=1, fills=True),
    "interleaved_1f1b": Schedule("Interleaved1F1B", stages=2, any_stages=True, in_rounds=True),
    "looped_bfs": Schedule("LoopedBFS", stages=2, any_stages=True),
    "interleaved_zero_bubble": Schedule(
        "InterleavedZeroBubble", stages=2, any_stages=True, splits_backward=True, in_rounds=True
    ),
    "zbv": Schedule("ZBVZeroBubble", stages=2, is_v=True, splits_backward=True),
    "dualpipe_v": Schedule("DualPipeV", stages=2, is_v=True, splits_backward=True, fills=True),
}
"""Schedules, keyed by the value of `pipeline_schedule`. Sources: gpipe (Huang et al. 2019); 1f1b and interleaved_1f1b (Narayanan
et al. 2021); looped_bfs (Lamy-Poirier 2023); interleaved_zero_bubble and zbv (Qi et al. 2024); dualpipe_v (DualPipe cut in half,
DeepSeek-AI 2024, V3)."""


def ranges(counts: Sequence[int]) -> list[range]:
    """Return the block numbers of each stage. counts: blocks per stage."""
    return [range(*bounds) for bounds in pairwise(accumulate(counts, initial=0))]


def balanced(costs: Sequence[float], last: float, stages: int) -> list[int]:
    """Return the number of blocks per stage, at least 1 each, so that the most expensive stage is as cheap as possible. Among
    equally good splits, choose the most even one. costs: cost of each block; last: cost of the modules after the last block."""
    before = [0.0, *accumulate(costs)]
    blocks = len(costs)

    @cache
    def best(start: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Split block `start` and all later ones into `left` stages. Return the largest cost, the sum of squares, the counts."""
        if left == 1:
            cost = before[blocks] - before[start] + last
            return cost, cost**2, (blocks - start,)
        found = []
        for stop in range(start + 1, blocks - left + 2):
            cost = before[stop] - before[start]
            largest, squares, counts = best(stop, left - 1)
            found.append((max(cost, largest), cost**2 + squares, (stop - start, *counts)))
        return min(found)

    return list(best(0, stages)[2])


def stage_problems(
    name: str, ranks: int, per_rank: int, split: Sequence[int] | None, *, blocks: int, micro_batches: int
) -> list[str]:
    """Return the reasons why `blocks` cannot be divided into stages, or why a schedule cannot run `micro_batches` per step. name:
    key in SCHEDULES; ranks, per_rank, split: the settings pipeline, pipeline_stages (resolved) and pipeline_split."""
    schedule, stages, found = SCHEDULES[name], ranks * per_rank, []
    product = f"pipeline({ranks}) x pipeline_stages({per_rank}) = {stages} stages"
    if per_rank != schedule.stages and not schedule.any_stages:
        found.append(
            f"parallelism.pipeline_stages({per_rank}): {name} needs pipeline_stages={schedule.stages}; use "
            f"{schedule.stages} or auto, or pipeline_schedule=interleaved_1f1b"
        )
    elif stages > blocks:
        found.append(
            f"parallelism.pipeline: {product}, but the model has {blocks} blocks; use fewer stages, or another schedule"
        )
    elif split is not None and (len(split), sum(split)) != (stages, blocks):
        found.append(
            f"parallelism.pipeline_split has {len(split)} stages with {sum(split)} blocks, but {product}, and the model has "
            f"{blocks} blocks; use null to split by FLOPs"
        )
    if schedule.fills and micro_batches < stages:
        found.append(
            f"parallelism.pipeline_schedule: {name} needs at least as many micro batches per step as stages, but "
            f"{micro_batches} is less than {product}; use a larger global_batch, a smaller micro_batch, or gpipe"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule.in_rounds and micro_batches % rounds:
        found.append(
            f"parallelism.pipeline_schedule: {name} cannot divide the {micro_batches} micro batches of a step into "
            f"{rounds} equal rounds; use a multiple of pipeline({ranks}) micro batches, or another schedule"
        )
    return found

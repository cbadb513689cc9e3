"""Computes the time of a step from the clocks of pipeline ranks, which were traced one by one without waiting for each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.pipeline.stages import ranges
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock, StepTime
from meshrunner.runner.predict.trace.depth import blocks_may_differ


@dataclass(frozen=True)
class TracedRanks:
    """Pipeline ranks that were traced, and the pipeline ranks that they stand for."""

    layout: Parallelism
    micro_batches: int
    neighbours: int
    """Difference between the global ranks of neighbours in a pipeline."""
    alike: tuple[int, ...]
    """For each pipeline rank, the first pipeline rank whose stages have the same blocks. These first ranks are traced. They hold
    as many micro batches at a time as the ranks like them, or more."""
    shown: int | None
    """Pipeline rank whose memory and work is predicted; None: the rank with most memory, and the rank with most work."""

    @property
    def traced(self) -> list[int]:
        """Pipeline ranks that are traced, in order."""
        return sorted(set(self.alike))

    def step_time(self, clocks: Sequence[SimulatedClock], exchanged: int) -> StepTime:
        """Return the time of a step from the clocks of the traced ranks at the end of the step.

        The exposed communication includes the wait for other pipeline ranks. exchanged: bytes that neighbours exchange for a
        micro batch.
        """
        from meshrunner.recipes.parallelism.pipeline.order import Pass, ends, passes_by_rank

        layout, schedule = self.layout, self.layout.schedule
        ranks, per_rank = layout.pipeline, layout.stages_per_rank
        stages = [schedule.stages_of(rank, ranks, per_rank) for rank in range(ranks)]
        place = {stage: (rank, turn) for rank, own in enumerate(stages) for turn, stage in enumerate(own)}
        clock_of = [clocks[self.traced.index(first)] for first in self.alike]
        times = [clock.step_time() for clock in clock_of]

        def cost(each: Pass) -> float:
            rank, turn = place[each.stage]
            return clock_of[rank].passes[each.name, stages[self.alike[rank]][turn], each.micro_batch]

        order = passes_by_rank(schedule, ranks, per_rank, self.micro_batches)
        rates, step = clocks[0].rates, self.neighbours
        # Of an all-gather of two ranks, each sends half of the buffer.
        transfers = (rates.collective_s("send", (r * step, (r + 1) * step), 2 * exchanged) for r in range(ranks - 1))
        ended = ends(order, ranks * per_rank, cost, max(transfers))
        outside = [time.seconds - sum(map(cost, own)) for time, own in zip(times, order, strict=True)]
        seconds = max(end + rest for end, rest in zip(ended, outside, strict=True))
        busy = [time.seconds for time in times]
        shown = times[busy.index(max(busy)) if self.shown is None else self.shown]
        return shown._replace(
            seconds=seconds,
            exposed_communication_s=shown.exposed_communication_s + seconds - shown.seconds,
            pipeline_idle_pct=100 * (1 - sum(busy) / (ranks * seconds)),
        )


def traced_ranks(recipe: Recipe, world: int, micro_batches: int, shown: int | None) -> TracedRanks | None:
    """Return the pipeline ranks to trace, or None without a pipeline. world: number of ranks. shown: global rank whose memory and
    work is predicted; None: the rank with most memory, and the rank with most work."""
    layout = recipe.parallelism
    if layout.pipeline == 1:
        return None
    neighbours, split = world // layout.pipeline, ranges(recipe.pipeline_split())
    costs, recomputes = recipe.model.block_flops(recipe.seq_len), recipe.activation_checkpoint.recomputes
    number, first = len(split), dict[object, int]()
    alike, own = list[int](), None if shown is None else shown // neighbours
    for rank in range(layout.pipeline):
        stages = layout.schedule.stages_of(rank, layout.pipeline, layout.stages_per_rank)
        kind = [
            (stage == 0, stage == number - 1, [(costs[block], recomputes(block)) for block in split[stage]])
            for stage in stages
        ]
        unlike = blocks_may_differ(recipe) or rank == own
        alike.append(rank if unlike else first.setdefault(str(kind), rank))
    return TracedRanks(layout, micro_batches, neighbours, tuple(alike), own)

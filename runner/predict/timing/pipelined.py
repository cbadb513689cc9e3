"""Computes the time of a step with a pipeline. Each rank was traced alone, so the waits between ranks are computed here."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.pipeline.stages import ranges
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock, StepTime
from meshrunner.runner.predict.trace.depth import blocks_may_differ


@dataclass(frozen=True)
class TracedRanks:
    """Pipeline ranks that were traced. Each traced rank represents all pipeline ranks whose stages have the same blocks."""

    layout: Parallelism
    micro_batches: int
    neighbours: int
    """Difference between the global ranks of neighbours in a pipeline."""
    alike: tuple[int, ...]
    """Traced rank that represents each pipeline rank: the emulated rank if it has the same blocks, else the first rank with
    the same blocks. The first rank holds at least as many micro batches at a time as later ranks."""
    traced: dict[int, int]
    """Global rank of each traced pipeline rank, keyed by pipeline rank, in ascending order."""
    own: int | None
    """Emulated pipeline rank, or None. If set, this rank is predicted, instead of the rank with the most memory or work."""

    def step_time(self, clocks: Sequence[SimulatedClock], exchanged: int) -> StepTime:
        """Return the time of a step from the clocks of the traced ranks at the end of the step. The exposed communication
        includes the wait for other pipeline ranks. exchanged: bytes that neighbours exchange for a micro batch."""
        from meshrunner.recipes.parallelism.pipeline.order import Pass, ends, passes_by_rank

        layout, schedule = self.layout, self.layout.schedule
        ranks, per_rank = layout.pipeline, layout.stages_per_rank
        stages = [schedule.stages_of(rank, ranks, per_rank) for rank in range(ranks)]
        place = {stage: (rank, turn) for rank, own in enumerate(stages) for turn, stage in enumerate(own)}
        clock_by_rank = dict(zip(self.traced, clocks, strict=True))
        clock_of = [clock_by_rank[rank] for rank in self.alike]
        times = [clock.step_time() for clock in clock_of]

        def cost(each: Pass) -> float:
            rank, turn = place[each.stage]
            return clock_of[rank].passes[each.name, stages[self.alike[rank]][turn], each.micro_batch]

        order = passes_by_rank(schedule, ranks, per_rank, self.micro_batches)
        rates, step = clocks[0].rates, self.neighbours
        # `send` is timed like an all-gather of two ranks, each of which sends half of the buffer, so pass twice the bytes.
        transfers = (rates.collective_s("send", (r * step, (r + 1) * step), 2 * exchanged) for r in range(ranks - 1))
        ended = ends(order, ranks * per_rank, cost, max(transfers))
        outside = [time.seconds - sum(map(cost, own)) for time, own in zip(times, order, strict=True)]
        seconds = max(end + rest for end, rest in zip(ended, outside, strict=True))
        busy = [time.seconds for time in times]
        shown = times[busy.index(max(busy)) if self.own is None else self.own]
        return shown._replace(
            seconds=seconds,
            exposed_communication_s=shown.exposed_communication_s + seconds - shown.seconds,
            pipeline_idle_pct=100 * (1 - sum(busy) / (ranks * seconds)),
        )


def traced_ranks(recipe: Recipe, world: int, micro_batches: int, emulated: int | None) -> TracedRanks | None:
    """Return the pipeline ranks to trace, or None without a pipeline. world: number of ranks. emulated: global rank or None."""
    layout = recipe.parallelism
    if layout.pipeline == 1:
        return None
    neighbours, split = world // layout.pipeline, ranges(recipe.pipeline_split())
    costs, recomputes = recipe.model.block_flops(recipe.seq_len), recipe.activation_checkpoint.recomputes
    first, alike = dict[str, int](), dict[int, int]()
    own = None if emulated is None else emulated // neighbours
    for rank in sorted(range(layout.pipeline), key=lambda rank: rank != own):
        stages = layout.schedule.stages_of(rank, layout.pipeline, layout.stages_per_rank)
        blocks = [[(costs[block], recomputes(block)) for block in split[stage]] for stage in stages]
        kind = str((blocks, 0 in stages, len(split) - 1 in stages))
        # In V-shaped schedules, ranks with the same blocks run different passes.
        differs = layout.schedule.is_v or blocks_may_differ(recipe)
        alike[rank] = rank if differs else first.setdefault(kind, rank)
    in_order = tuple(alike[rank] for rank in range(layout.pipeline))
    traced = {rank: rank * neighbours for rank in sorted(set(in_order))}
    if emulated is not None:
        traced[emulated // neighbours] = emulated
    return TracedRanks(layout, micro_batches, neighbours, in_order, traced, own)

"""Determine the order in which a schedule runs passes, and compute how long devices wait for each other."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _ComputationType, get_schedule_class

from meshrunner.recipes.parallelism.pipeline.stages import Schedule

KINDS = {
    _ComputationType.FORWARD: ("forward", 1.0),
    _ComputationType.FULL_BACKWARD: ("backward", 2.0),
    _ComputationType.BACKWARD_INPUT: ("backward", 1.0),
    _ComputationType.BACKWARD_WEIGHT: ("weights", 1.0),
}
"""Name and cost of a pass, keyed by torch's type of computation."""


class Pass(NamedTuple):
    """A pass of a micro batch through a stage."""

    name: str
    """`forward`, `backward` or `weights`. If the schedule splits backward, `weights` passes compute the weight gradients."""
    stage: int
    micro_batch: int
    cost: float
    """Duration, assuming that all stages take equally long and that sending takes no time."""

    def inputs(self, stages: int) -> list[tuple[str, int, int]]:
        """Return the name, stage and micro batch of each pass whose result this pass needs."""
        name, stage, micro_batch, _ = self
        if name == "weights":
            return [("backward", stage, micro_batch)]
        if name == "forward":
            return [("forward", stage - 1, micro_batch)] if stage else []
        after = [("backward", stage + 1, micro_batch)] if stage < stages - 1 else []
        return [("forward", stage, micro_batch), *after]


def idle_share(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> float:
    """Return the fraction of a step in which a pipeline rank waits, averaged over ranks."""
    order = passes_by_rank(schedule, ranks, per_rank, micro_batches)
    busy = sum(each.cost for passes in order for each in passes)
    return 1 - busy / (ranks * max(ends(order, ranks * per_rank, lambda each: each.cost)))


def passes_by_rank(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> list[list[Pass]]:
    """Return the passes of each pipeline rank, in the order in which the rank runs them."""
    if schedule.any_stages or schedule.is_v:
        return _recorded_order(schedule, ranks, per_rank, micro_batches)
    # torch records the order of 1F1B wrongly
    ahead = [min(micro_batches, ranks - rank) if schedule.fills else micro_batches for rank in range(ranks)]
    return [_one_stage(rank, forwards, micro_batches) for rank, forwards in enumerate(ahead)]


def _one_stage(stage: int, ahead: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a rank with one stage. ahead: number of forwards before the first backward."""
    forwards, backwards = (
        [Pass(name, stage, number, cost) for number in range(micro_batches)]
        for name, cost in (KINDS[_ComputationType.FORWARD], KINDS[_ComputationType.FULL_BACKWARD])
    )
    alternating = [each for pair in zip(backwards, forwards[ahead:], strict=False) for each in pair]
    return [*forwards[:ahead], *alternating, *backwards[micro_batches - ahead :]]


def _recorded_order(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> list[list[Pass]]:
    """Return the passes of each rank, in the order that torch's schedule class records."""
    number = ranks * per_rank
    common = {"num_stages": number, "group_size": ranks, "group_rank": 0, "submod": None, "has_backward": True}
    stages = [
        SimpleNamespace(stage_index=index, is_first=index == 0, is_last=index == number - 1, **common)
        for index in schedule.stages_of(0, ranks, per_rank)
    ]
    kind: Callable[..., PipelineScheduleMulti] = get_schedule_class(schedule.torch_name)
    made = kind(stages, n_microbatches=micro_batches, loss_fn=lambda output, _: output)
    return [_passes(made.pipeline_order[rank]) for rank in range(ranks)]


def _passes(actions: list[_Action | None]) -> list[Pass]:
    parts = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
    return [
        Pass(name, part.stage_index, part.microbatch_index, cost)
        for part in parts
        if part.computation_type in KINDS and part.microbatch_index is not None
        for name, cost in (KINDS[part.computation_type],)
    ]


def ends(order: list[list[Pass]], stages: int, cost: Callable[[Pass], float], transfer: float = 0.0) -> list[float]:
    """Return the time at which each rank has finished its passes, if each pass starts as early as its inputs allow. cost:
    duration of a pass. transfer: duration of sending a result to another rank. The sender does not wait for the transfer."""
    done: dict[tuple[str, int, int], tuple[int, float]] = {}
    clocks, todo = [0.0] * len(order), [list(reversed(passes)) for passes in order]
    while any(todo):
        for rank, passes in enumerate(todo):
            while passes and all(key in done for key in passes[-1].inputs(stages)):
                this = passes.pop()
                inputs = [done[key] for key in this.inputs(stages)]
                arrivals = [time + transfer * (origin != rank) for origin, time in inputs]
                clocks[rank] = max([clocks[rank], *arrivals]) + cost(this)
                done[this[:3]] = rank, clocks[rank]
    return clocks

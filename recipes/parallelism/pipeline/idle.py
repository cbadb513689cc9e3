"""Compute from a schedule's order how long devices wait for each other."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _ComputationType, get_schedule_class

from meshrunner.recipes.parallelism.pipeline.stages import Schedule

COSTS = {
    _ComputationType.FORWARD: 1.0,
    _ComputationType.FULL_BACKWARD: 2.0,
    _ComputationType.BACKWARD_INPUT: 1.0,
    _ComputationType.BACKWARD_WEIGHT: 1.0,
}
"""Assumed durations. All stages are assumed to take equally long, and sending to take no time."""


class Pass(NamedTuple):
    """A forward or backward pass of a micro batch through a stage. `kind` is a key of COSTS."""

    kind: _ComputationType
    stage: int
    micro_batch: int


def idle_share(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> float:
    """Return the share of a step in which a pipeline rank waits, averaged over ranks."""
    if schedule.any_stages or schedule.is_v:
        order = _recorded_order(schedule, ranks, per_rank, micro_batches)
    else:  # torch records the order of 1F1B wrongly
        ahead = [min(micro_batches, ranks - rank) if schedule.fills else micro_batches for rank in range(ranks)]
        order = [_one_stage(rank, forwards, micro_batches) for rank, forwards in enumerate(ahead)]
    busy = sum(COSTS[each.kind] for passes in order for each in passes)
    return 1 - busy / (ranks * _length(order, ranks * per_rank))


def _one_stage(stage: int, ahead: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a rank with one stage. ahead: number of forwards before the first backward."""
    forwards, backwards = (
        [Pass(kind, stage, number) for number in range(micro_batches)]
        for kind in (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD)
    )
    alternating = [each for pair in zip(backwards, forwards[ahead:], strict=False) for each in pair]
    return [*forwards[:ahead], *alternating, *backwards[micro_batches - ahead :]]


def _recorded_order(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> list[list[Pass]]:
    """Return the passes of each rank, in torch's order."""
    number = ranks * per_rank
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=number,
            group_size=ranks,
            group_rank=0,
            submod=None,
            is_first=index == 0,
            is_last=index == number - 1,
            has_backward=True,
        )
        for index in schedule.stages_of(0, ranks, per_rank)
    ]
    kind: Callable[..., PipelineScheduleMulti] = get_schedule_class(schedule.torch_name)
    made = kind(stages, n_microbatches=micro_batches, loss_fn=lambda output, _: output)
    return [_passes(made.pipeline_order[rank]) for rank in range(ranks)]


def _passes(actions: list[_Action | None]) -> list[Pass]:
    parts = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
    return [
        Pass(part.computation_type, part.stage_index, part.microbatch_index)
        for part in parts
        if part.computation_type in COSTS and part.microbatch_index is not None
    ]


def _length(order: list[list[Pass]], stages: int) -> float:
    """Return the time at which the last rank has finished, if each pass starts as early as its inputs allow."""
    ends: dict[tuple[str, int, int], float] = {}
    clocks, todo = [0.0] * len(order), [list(reversed(passes)) for passes in order]
    while any(todo):
        for rank, passes in enumerate(todo):
            while passes and all(key in ends for key in _inputs(passes[-1], stages)):
                done = passes.pop()
                start = max([clocks[rank], *(ends[key] for key in _inputs(done, stages))])
                clocks[rank] = start + COSTS[done.kind]
                ends[_name(done.kind), done.stage, done.micro_batch] = clocks[rank]
    return max(clocks)


def _name(kind: _ComputationType) -> str:
    return {_ComputationType.FORWARD: "forward", _ComputationType.BACKWARD_WEIGHT: "weights"}.get(kind, "backward")


def _inputs(each: Pass, stages: int) -> list[tuple[str, int, int]]:
    """Return the passes whose results a pass needs."""
    _, stage, micro_batch = each
    match _name(each.kind):
        case "forward":
            return [("forward", stage - 1, micro_batch)] if stage else []
        case "weights":
            return [("backward", stage, micro_batch)]
    after = [("backward", stage + 1, micro_batch)] if stage < stages - 1 else []
    return [("forward", stage, micro_batch), *after]

"""How blocks are divided among pipeline stages, and which counts of blocks and micro batches are refused."""

from itertools import combinations
from random import Random

import pytest

from meshrunner.recipes.parallelism.pipeline.order import idle_share
from meshrunner.recipes.parallelism.pipeline.stages import SCHEDULES, balanced, ranges
from tests.composed import experiment


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ranks_hold_each_stage_once(schedule: str) -> None:
    kind = SCHEDULES[schedule]
    held = [kind.stages_of(rank, 4, kind.stages) for rank in range(4)]
    assert sorted(stage for stages in held for stage in stages) == list(range(4 * kind.stages))


def test_a_rank_of_a_v_holds_a_stage_of_each_half() -> None:
    assert [SCHEDULES["zbv"].stages_of(rank, 3, 2) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [SCHEDULES["interleaved_1f1b"].stages_of(rank, 3, 2) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_ranges_follow_each_other() -> None:
    assert ranges([2, 1, 3]) == [range(2), range(2, 3), range(3, 6)]


@pytest.mark.parametrize("seed", range(20))
def test_no_split_has_a_cheaper_largest_stage(seed: int) -> None:
    """Compare with all splits."""
    random = Random(seed)
    costs, last = [random.choice([1, 2, 5]) for _ in range(8)], random.choice([0, 3, 9])
    stages = random.randrange(1, 5)

    def largest(counts: list[int]) -> float:
        sums = [sum(costs[i] for i in blocks) for blocks in ranges(counts)]
        return max([*sums[:-1], sums[-1] + last])

    found = balanced(costs, last, stages)
    every = [
        [b - a for a, b in zip((0, *cuts), (*cuts, 8), strict=True)] for cuts in combinations(range(1, 8), stages - 1)
    ]
    assert found in every
    assert largest(found) == min(map(largest, every))


def test_equal_blocks_are_divided_evenly_and_the_projection_counts() -> None:
    assert balanced([1] * 12, 0, 4) == [3, 3, 3, 3]
    assert balanced([1] * 12, 2, 4) == [3, 3, 4, 2]
    assert balanced([1] * 2, 5, 2) == [1, 1]


def test_every_flop_of_the_model_is_in_a_stage() -> None:
    for overrides in (("model=llama_tiny",), ("model=moe_tiny",), ("model=hybrid_tiny", "model.mtp.depth=2")):
        model = experiment(*overrides).model
        flops = model.block_flops(256)
        assert sum(flops) == model.flops_per_token(256).total
        assert len(flops) == 1 + len([name for name in model.on_meta(8).block_names() if name.startswith("layers.")])
    # The experts, Mamba blocks and modules of multi-token prediction have their own costs.
    assert len(set(flops)) > 3 and flops[-1] > flops[0]


def test_the_split_of_a_recipe() -> None:
    pipeline = ("model=llama_tiny", "parallelism.pipeline=2", "model.n_layers=6")
    assert sum(experiment(*pipeline).pipeline_split()) == 6
    assert experiment(*pipeline, "parallelism.pipeline_split=[1,5]").pipeline_split() == [1, 5]
    assert len(experiment(*pipeline, "parallelism.pipeline_schedule=zbv").pipeline_split()) == 4


def test_a_null_global_batch_fills_the_pipeline() -> None:
    recipe = experiment("parallelism.pipeline=2", "micro_batch=3", "global_batch=null")
    assert recipe.accumulation(4) == (24, 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_idle_time_is_that_of_the_schedule(ranks: int) -> None:
    """Narayanan et al. 2021, section 2.2. Schedules that split backward wait less."""
    for micro_batches in range(ranks, 4 * ranks + 1, ranks):
        idle = {
            name: idle_share(kind, ranks, kind.stages, micro_batches)
            for name, kind in SCHEDULES.items()
            if not kind.fills or micro_batches >= ranks * kind.stages
        }
        for name in ("gpipe", "1f1b", "interleaved_1f1b"):
            stages = SCHEDULES[name].stages
            assert idle[name] == pytest.approx((ranks - 1) / (stages * micro_batches + ranks - 1), abs=1e-12), name
        for name in idle.keys() & {"interleaved_zero_bubble", "zbv", "dualpipe_v"}:
            assert 0 < idle[name] < idle["interleaved_1f1b"], name

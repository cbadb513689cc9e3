"""An emulated rank allocates as the same rank of a real run does, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshrunner.runner.launch.worker import join_fake_process_group
from tests.composed import SMALL
from tests.dist.ranks import context, on_ranks
from tests.dist.test_layouts import CONTEXT, ULYSSES
from tests.dist.test_plan import StepPeak
from tests.dist.test_profiled_memory import measured, profiled, worker

MOE = "model=moe_tiny model.dim=48 model.n_heads=6 model.n_kv_heads=2 model.n_layers=2 model.experts.routing=balanced"
LAYOUTS = {
    2: [
        "parallelism=ddp",
        "parallelism=fsdp1",
        "parallelism=fsdp2",
        "parallelism=fsdp2 wrap=root_only activation_checkpoint=full",
        "parallelism=fsdp2 parallelism.buffers=max_pool global_batch=8",
        "parallelism=tp",
        "parallelism=fsdp2 precision=bf16",
        f"parallelism=fsdp2 {CONTEXT}",
        f"parallelism=fsdp2 {CONTEXT} {ULYSSES}",
        f"parallelism=fsdp2 parallelism.expert=2 seq_len=32 {MOE}",
        "parallelism=ddp parallelism.pipeline=2",
        "parallelism=fsdp2_pp parallelism.pipeline_schedule=interleaved_1f1b model.n_layers=4 activation_checkpoint=full",
    ],
    4: [
        "parallelism=hsdp1",
        "parallelism=hsdp2",
        "parallelism=fsdp1_tp",
        "parallelism=fsdp2_tp",
        "parallelism=fsdp2_pp",
    ],
}


def cases(world: int) -> list[list[str]]:
    return [[*SMALL, "global_batch=null", f"launch.workers={world}", *each.split()] for each in LAYOUTS[world]]


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_memory_equals_that_of_a_real_rank(world: int, tmp_path: Path) -> None:
    ranks, given = (0, world - 1), cases(world)
    jobs = [(case, rank, world, tmp_path / f"{i}-{rank}") for i, case in enumerate(given) for rank in ranks]
    with context.Pool(1, maxtasksperchild=1) as pool:  # a process can emulate one rank only
        peaks = pool.starmap(emulated, jobs, chunksize=1)
    left = [(case, (first, last)) for case, first, last in zip(given, peaks[::2], peaks[1::2], strict=True)]
    for _ in range(4):
        real = on_ranks(world, measured, [case for case, _ in left])
        found = [tuple(real[rank][i] for rank in ranks) for i in range(len(left))]
        # A thread of gloo may free a buffer late, which adds to the peak of a real rank.
        assert all(
            a.total >= b.total
            for pair, (_, own) in zip(found, left, strict=True)
            for a, b in zip(pair, own, strict=True)
        )
        left = [each for each, pair in zip(left, found, strict=True) if pair != each[1]]
        if not left:
            break
    assert not left


def emulated(case: list[str], rank: int, world: int, run_dir: Path) -> StepPeak:
    torch.set_num_threads(1)
    run_dir.mkdir()
    alone = worker(rank, world, 0, emulated=True)
    join_fake_process_group(alone, pipelined=any("pipeline" in word or word.endswith("_pp") for word in case))
    return profiled([*case, f"launch.emulate={rank}"], alone, run_dir)

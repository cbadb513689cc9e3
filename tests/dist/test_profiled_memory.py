"""`plan` predicts the peak that `run profiler=memory` measures on a CPU, to the byte: random configurations of odd shapes."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.pretrain import train
from meshrunner.runner.config.devices import check_on_devices
from meshrunner.runner.measure.meter import RunMeter
from meshrunner.runner.process.worker_context import Node, SharedIntegers, WorkerContext
from meshrunner.runner.rundir.files import memory_profile
from tests.composed import SMALL, config
from tests.dist.ranks import context, on_ranks
from tests.dist.test_plan import StepPeak
from tests.hugging_face import saved

RANDOM = {1: range(4), 2: range(10), 4: range(6)}
"""Seeds of random configurations, keyed by number of ranks."""
SOME = [
    "parallelism=fsdp2 model.freeze=[tok_embeddings.*,layers.1.*] parallelism.reshard_after_forward=never global_batch=6",
    "parallelism=fsdp2 parallelism.buffers=max_pool log_every=3",
    "parallelism=tp loss=chunked loss.tokens=16",
    "parallelism=tp loss=chunked loss.tokens=16 loss.z=0.1 optimizer=muon optimizer.no_decay=[*norm.weight]",
    "parallelism=fsdp2 optimizer=muon optimizer.skip_above=3 loss.z=0.1",
]
PROFILED = ("profiler=memory", "profiler.ranks=all", "profiler.steps=2", "steps=5", "measure_after=2", "data=random")
ATTENTION = "model.dim=48 model.n_heads=6 model.n_kv_heads=2"
HYBRID = (
    "model=hybrid_tiny model.dim=48 model.n_heads=4 model.n_kv_heads=2 model.head_dim=12 model.ffn_dim=60 model.mamba.heads=4"
    " model.mamba.head_dim=12 model.mamba.groups=2 model.mamba.state=8 model.mamba.chunk=16 model.experts.ffn_dim=20"
)
SPACE: dict[str, list[str]] = {
    "model": [
        f"model=llama_tiny {ATTENTION} model.n_layers=3 model.ffn_dim=100",
        f"model=llama_tiny {ATTENTION} model.n_layers=3 model.qkv_bias=true model.qk_norm=true model.head_dim=12",
        f"model=moe_tiny {ATTENTION} model.n_layers=3 model.ffn_dim=100 model.experts.number=6 model.experts.ffn_dim=20",
        f"model=moe_tiny {ATTENTION} model.n_layers=2 model.experts.shared_ffn_dim=0 model.experts.balance=sequence_loss",
        HYBRID,
        f"{HYBRID} model.mtp.depth=1",
    ],
    "tied": ["", "", "model.tie_embeddings=true"],
    "frozen": ["", "", "", "model.freeze=[tok_embeddings.*,layers.1.*]", "model.freeze=[layers.0.*]"],
    "vocabulary": ["model.vocab_size=509", "model.vocab_size=514"],
    "sequence": ["seq_len=34", "seq_len=48", "seq_len=65"],
    "batch": ["micro_batch=1", "micro_batch=2", "micro_batch=3"],
    "accumulated": ["global_batch=null", "global_batch=12", "global_batch=24"],
    "precision": ["", "", "precision=bf16"],
    "recomputed": ["", "", *(f"activation_checkpoint={each}" for each in ("full", "selective_op", "selective_layer"))],
    "loss": ["", "loss=chunked loss.tokens=16", "loss=chunked loss.tokens=50"],
    "clipped": ["", "max_grad_norm=0.2", "max_grad_norm=null"],
    "optimizer": ["", "optimizer=muon", "optimizer.implementation=foreach", "optimizer.implementation=for_loop"],
    "extras": ["", "", "optimizer.skip_above=3", "loss.z=0.1", "optimizer.no_decay=['*norm*']"],
    "read": ["", "log_every=3"],
}
LAYOUTS: dict[int, list[str]] = {
    1: ["single", "fsdp2"],
    2: [
        *(
            "ddp",
            "fsdp1",
            "fsdp1 wrap=size wrap.min_parameters=5000",
            "fsdp2",
            "fsdp2 wrap=root_only",
            "fsdp2 wrap=rules",
            "tp",
        ),
        *(
            "fsdp2 parallelism.buffers=max_pool",
            "fsdp2 parallelism.accumulate=hold",
            "tp parallelism.sequence_parallel=false",
        ),
        *("fsdp2 parallelism.reshard_after_forward=never", "fsdp2 parallelism.prefetch=2"),
    ],
    4: ["hsdp1", "hsdp2", "fsdp1_tp", "fsdp2_tp", "fsdp2 parallelism.reshard_after_forward=2"],
}


def drawn(world: int, seed: int) -> list[str]:
    """Return the overrides of a random configuration. Draw again until it is valid."""
    draw = random.Random(seed)
    while True:
        words = [draw.choice(values) for values in SPACE.values()]
        overrides = " ".join([*words, f"parallelism={draw.choice(LAYOUTS[world])} launch.workers={world}"]).split()
        try:
            check_on_devices(config(*PROFILED, *overrides))
        except ConfigError:
            continue
        return overrides


@pytest.mark.slow
@pytest.mark.parametrize("world", RANDOM)
def test_plan_equals_profiled_runs(world: int) -> None:
    _compare(world, [drawn(world, seed) for seed in RANDOM[world]])


@pytest.mark.slow
def test_plan_equals_profiled_runs_with_frozen_parameters_pools_and_split_matmuls() -> None:
    _compare(2, [[*SMALL, "global_batch=null", "launch.workers=2", *each.split()] for each in SOME])


@pytest.mark.slow(sampled=True)
def test_plan_equals_profiled_runs_that_read_weights() -> None:
    shapes = ["model=hf", f"model.path={saved('qwen3')}", "seq_len=48", "micro_batch=1", "launch.workers=2"]
    _compare(2, [[*shapes, f"parallelism={each}"] for each in ("ddp", "fsdp1", "fsdp2", "tp")])


def _compare(world: int, cases: list[list[str]]) -> None:
    predictions = predicted(cases)
    found = dict(enumerate(on_ranks(world, measured, cases)[0]))
    for _ in range(3):
        unequal = [i for i, prediction in enumerate(predictions) if found[i] != prediction]
        if not unequal:
            break
        # A thread of gloo may free a buffer late, which adds some bytes to a peak.
        assert all(found[i].total >= predictions[i].total for i in unequal), [(cases[i], found[i]) for i in unequal]
        found |= zip(unequal, on_ranks(world, measured, [cases[i] for i in unequal])[0], strict=True)
    for case, prediction, peak in zip(cases, predictions, found.values(), strict=True):
        assert prediction == peak, " ".join(case)


def measured(cases: list[list[str]]) -> list[StepPeak]:
    """Return this rank's peak in each case."""
    return [_measured(case) for case in cases]


def _measured(case: list[str]) -> StepPeak:
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    run_dir = Path(folder[0])
    found = profiled(case, worker(rank, world, rank), run_dir)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(run_dir)
    return found


def worker(rank: int, world: int, local_rank: int, *, emulated: bool = False) -> WorkerContext:
    shared = [SharedIntegers(world) for _ in range(3)]
    node = Node(0, 1, "localhost", 0, "0")
    return WorkerContext(rank, local_rank, world, node, "cpu", 1, 1, *shared, None, emulated=emulated)


def profiled(case: list[str], worker: WorkerContext, run_dir: Path) -> StepPeak:
    """Train with profiler=memory on this rank, and return its peak."""
    experiment, _ = check_on_devices(config(*PROFILED, *case))
    train(
        experiment, RunMeter(experiment, run_dir, worker), device=torch.device("cpu"), nodes=1, workers=worker.workers
    )
    found = json.loads(memory_profile(run_dir, worker.rank, ".json").read_text())
    return StepPeak(found["peak_live_bytes"], found["by_category"], found["phase"])


def predicted(cases: list[list[str]]) -> list[StepPeak]:
    """Predict in another process, because torch has only one default group per process."""
    with context.Pool(1) as pool:
        return [StepPeak(*each) for each in pool.apply(_predicted, (cases,))]


def _predicted(cases: list[list[str]]) -> list[tuple[Any, ...]]:
    from meshrunner.runner.predict.predict import predict

    torch.set_num_threads(1)
    found = []
    for case in cases:
        forecast = predict(*check_on_devices(config(*PROFILED, *case)))
        assert forecast.memory is not None, (case, forecast.verdict)
        memory = forecast.memory
        parts = {name: round(gib * 2**30) for name, gib in memory.by_category_gib.items()}
        found.append((round(memory.peak_active_gib * 2**30), parts, memory.phase))
    return found

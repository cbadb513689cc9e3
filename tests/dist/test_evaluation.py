"""The held-out loss: equal in every layout, and training goes on as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from meshrunner.recipes.checkpoint.on_disk import FOLDER
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.pretrain import train
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import (
    COMPILED,
    CONTEXT,
    CPU,
    GPIPE,
    INTERLEAVED,
    NEVER,
    PIPELINE,
    ULYSSES,
    ZERO_BUBBLE,
    Recorder,
)

EVAL = ("eval=held_out", "eval.every=2", "eval.sequences=13")
EXPERTS = "model=moe_tiny model.experts.ffn_dim=24 model.experts.shared_ffn_dim=20 model.experts.balance=bias"
PREDICTIONS = (
    "model=hybrid_tiny model.pattern=*- model.mamba=null model.experts=null model.head_dim=8 model.mtp.depth=2"
)
LAYOUTS = {
    2: [
        "parallelism=ddp",
        "parallelism=fsdp1",
        f"parallelism=fsdp1 {NEVER}",
        "parallelism=fsdp2",
        f"parallelism=fsdp2 {NEVER} micro_batch=3",
        "parallelism=fsdp2 parallelism.reshard_after_forward=except_last parallelism.prefetch=2",
        "parallelism=fsdp2 parallelism.accumulate=hold loss=chunked loss.tokens=13 activation_checkpoint=full",
        f"parallelism=fsdp2 {COMPILED}",
        f"parallelism=fsdp2 {CONTEXT}",
        f"parallelism=fsdp2 {CONTEXT} {ULYSSES}",
        f"parallelism=fsdp2 {EXPERTS} parallelism.expert=2",
        f"parallelism=fsdp2 {PREDICTIONS}",
        *(f"parallelism=fsdp2 {PIPELINE} {schedule}" for schedule in ("", GPIPE, INTERLEAVED)),
        f"parallelism=fsdp2 {PIPELINE} {ZERO_BUBBLE} {NEVER}",
        "parallelism=tp micro_batch=3",
        "parallelism=fsdp2 precision=bf16",
    ],
    4: [
        "parallelism=fsdp2_tp micro_batch=3",
        "parallelism=hsdp2",
        "parallelism=fsdp2_tp parallelism.loss_parallel=false micro_batch=3",
        f"parallelism=fsdp2 {PIPELINE} parallelism.tensor=2 micro_batch=3",
    ],
}
MODELS: list[nn.Module] = []
"""Models of this process: DDP must not be destroyed before its process group."""


class Evaluated(Recorder):
    """A meter that keeps everything a step or an evaluation reports."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []
        self.evals: list[tuple[int, float, int]] = []
        self.graphs: list[int] = []

    def step_done(self, step: int, *, observed: dict[str, Tensor], **figures: Any) -> None:
        super().step_done(step, observed=observed, **figures)
        found = {"loss": figures["loss"], "grad_norm": figures["grad_norm"], **observed}
        self.steps.append({key: value.item() for key, value in found.items()})

    def evaluate(self, step: int, loss: Callable[[], Tensor], tokens: int) -> bool:
        mean = loss()
        dist.all_reduce(mean)
        self.evals.append((step, mean.item() / dist.get_world_size(), tokens))
        self.graphs.append(counters["stats"]["unique_graphs"])
        return False


def trained(overrides: str, *more: str, checkpoints: Path | None = None) -> Evaluated:
    meter = Evaluated()
    model, _ = train(
        experiment(
            *(key for key in SMALL if "hybrid" not in overrides or "n_layers" not in key), *overrides.split(), *more
        ),
        meter,
        device=CPU,
        nodes=1,
        workers=dist.get_world_size(),
        checkpoints=checkpoints,
    )
    MODELS.append(model)
    return meter


def with_and_without(layouts: list[str]) -> list[tuple[list[Any], bool, bool]]:
    """Return, for each layout: its evaluations, whether training is bitwise as without them, and whether the last evaluation
    left no unit gathered and no unit to prefetch."""
    found = []
    for layout in layouts:
        torch._dynamo.reset()
        meter = trained(layout, *EVAL)
        model = MODELS[-1]
        pipeline = network_of(model).pipeline
        wrapped = [model] if pipeline is None else pipeline.stages.values()
        units = [module for each in wrapped for module in each.modules() if isinstance(module, FSDPModule)]
        clean = all(not unit._get_fsdp_state()._comm_ctx.post_forward_order for unit in units)
        clean &= all(
            group._sharded_state.name == "SHARDED"
            for unit in units
            for group in (unit._get_fsdp_state()._fsdp_param_groups)
        )
        if isinstance(model, FullyShardedDataParallel):
            clean &= not model._exec_order_data.handles_pre_forward_order
            clean &= not any(
                unit._handle and unit._handle.needs_unshard() is False for unit in model.fsdp_modules(model)
            )
        if COMPILED in layout:  # neither later evaluations nor training between them compile again
            clean &= len(set(meter.graphs[1:])) == 1
        found.append((meter.evals, meter.steps == trained(layout, "eval=none").steps, clean))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", sorted(LAYOUTS))
def test_held_out_loss_is_equal_in_every_layout_and_leaves_training_as_it_is(world: int) -> None:
    layouts = LAYOUTS[world]
    changes = ("model", "seq_len", "precision=")
    models = {layout: " ".join(word for word in layout.split() if word.startswith(changes)) for layout in layouts}
    kinds = list(dict.fromkeys(models.values()))
    alone = dict(
        zip(
            kinds,
            (found[0] for found in on_ranks(1, with_and_without, [f"parallelism=single {k}" for k in kinds])[0]),
            strict=True,
        )
    )
    for rank, results in enumerate(on_ranks(world, with_and_without, layouts)):
        for layout, (evals, same, clean) in zip(layouts, results, strict=True):
            assert same and clean, (rank, layout, same, clean)
            expected = alone[models[layout]]
            assert [(step, tokens) for step, _, tokens in evals] == [(step, tokens) for step, _, tokens in expected]
            assert [step for step, _, _ in evals] == [0, 2, 4, 5]
            tolerance = 1e-2 if "bf16" in layout else 1e-6
            for (_, mine, _), (_, theirs, _) in zip(evals, expected, strict=True):
                assert mine == pytest.approx(theirs, rel=tolerance), (layout, evals, expected)


def resumed(folder: Path) -> list[list[int]]:
    saves = ("parallelism=fsdp2", "checkpoint=dcp", "checkpoint.every=4")
    first = trained("steps=4", *saves, *EVAL, checkpoints=folder / FOLDER)
    branch = trained("steps=7", "parallelism=fsdp2", f"checkpoint.load={folder}", *EVAL)
    rest = trained("steps=7", *saves, *EVAL, checkpoints=folder / FOLDER)
    return [[step for step, _, _ in each.evals] for each in (first, rest, branch)]


def test_a_resumed_run_evaluates_each_step_once(tmp_path: Path) -> None:
    """A run that starts from the checkpoint of another run has no evaluation of this checkpoint yet."""
    for evaluated in on_ranks(2, resumed, tmp_path):
        assert evaluated == [[0, 2, 4], [6, 7], [4, 6, 7]]

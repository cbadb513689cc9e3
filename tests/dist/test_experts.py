"""
Models with experts under every layout against one process: initial weights, gradients, losses, norms, and, to the last bit, the
loads of all experts and the biases of every step.

python -m tests.dist.test_experts > docs/measurements/experts.md
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrunner.recipes import pretrain
from meshrunner.recipes.model.experts import feed_forward
from meshrunner.recipes.model.network import Loads, network_of
from tests.composed import SMALL, experiment
from tests.dist import test_checkpoint as checkpoints
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import (
    CONTEXT,
    CPU,
    DOCUMENTS,
    INTERLEAVED,
    PIPELINE,
    ULYSSES,
    ZBV,
    Difference,
    Recorder,
    difference,
    observe,
)
from tests.dist.test_recompute import products

EXPERTS = (
    "model=moe_tiny",
    *SMALL,
    "model.experts.number=8",
    "model.experts.ffn_dim=24",
    "model.experts.shared_ffn_dim=20",
    "model.experts.balance_rate=1e-2",
)
NEAR = 1e-6
"""Smallest safe distance of two scores. Layouts differ by about 1e-7, so a closer decision could differ between them."""


def observe_experts(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return `observe`, and also every step's loads before they are reset, and the biases after it."""
    loads: list[Tensor] = []
    biases: list[Tensor] = []
    balance = Loads.balance

    def recorded(own: Loads, *args: Any) -> dict[str, Tensor]:
        total = own.tokens.clone()
        for group in own.groups:
            dist.all_reduce(total, group=group)
        loads.append(total)
        observed = balance(own, *args)
        biases.append(own.bias.clone())
        return observed

    with patch.object(Loads, "balance", recorded):
        return observe(overrides) | {"loads": loads, "biases": biases}


def observe_decisions(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return `observe_experts`, and also the smallest distance between two scores of which one was chosen."""
    gaps: list[float] = []
    topk = torch.topk

    def measured(scores: Tensor, k: int, **how: Any) -> Any:
        best = topk(scores, min(k + 1, scores.shape[-1])).values
        gaps.append((best[..., k - 1] - best[..., -1]).min().item())
        return topk(scores, k, **how)

    with patch.object(feed_forward.torch, "topk", measured):  # type: ignore[attr-defined]
        return observe_experts(overrides) | {"gap": min(gaps, default=1.0)}


@cache
def reference(model: str, base: tuple[str, ...] = EXPERTS) -> dict[str, Any]:
    """One process, one micro batch."""
    found = on_ranks(1, observe_decisions, (*base, "parallelism=single", "micro_batch=12", *model.split()))[0]
    assert found["gap"] > NEAR, (
        f"a routing decision is as near as {found['gap']}: other layouts may differ; use another seed"
    )
    return found


SOFTMAX = "model.experts.score=softmax model.experts.balance=sequence_loss model.experts.route_scale=2.5"
AS_UNITS = "wrap=rules wrap.rules=[{match:layers.*},{match:layers.*.feed_forward.experts}]"
FULL, SELECTIVE = (f"activation_checkpoint={kind}" for kind in ("full", "selective_op"))
LAYOUTS = [
    (1, "parallelism=single micro_batch=4"),
    (1, f"parallelism=single micro_batch=12 {FULL}"),
    (1, f"parallelism=single micro_batch=12 {SELECTIVE}"),
    (2, "parallelism=ddp micro_batch=6"),
    (3, "parallelism=ddp"),
    (2, f"parallelism=ddp micro_batch=2 {FULL} {SOFTMAX}"),
    (2, "parallelism=fsdp1 micro_batch=2"),
    (2, f"parallelism=fsdp1 {FULL} {AS_UNITS}"),
    (2, f"parallelism=fsdp1 micro_batch=6 {SELECTIVE} {SOFTMAX}"),
    (3, "parallelism=fsdp1"),
    (1, "parallelism=fsdp2"),
    (2, "parallelism=fsdp2 micro_batch=2"),
    (2, f"parallelism=fsdp2 micro_batch=2 {FULL}"),
    (2, f"parallelism=fsdp2 micro_batch=6 {SELECTIVE} {SOFTMAX}"),
    (2, f"parallelism=fsdp2 {AS_UNITS}"),
    (3, "parallelism=fsdp2 micro_batch=4"),
    (4, f"parallelism=fsdp2 {SELECTIVE}"),
    (4, "parallelism=fsdp2 model.experts.number=3"),
    (4, "parallelism=fsdp2 model.experts.number=6"),
    (4, "parallelism=hsdp2"),
    (4, f"parallelism=hsdp1 {FULL}"),
    (2, "parallelism=tp micro_batch=6"),
    (2, f"parallelism=tp micro_batch=2 {FULL}"),
    (2, f"parallelism=tp parallelism.sequence_parallel=false micro_batch=6 {SELECTIVE} {SOFTMAX}"),
    (2, f"parallelism=tp micro_batch=6 {SOFTMAX}"),
    (2, "parallelism=tp parallelism.sequence_parallel=false micro_batch=6"),
    (4, "parallelism=fsdp2_tp micro_batch=3"),
    (4, f"parallelism=fsdp2_tp micro_batch=2 {FULL} {SOFTMAX}"),
    (4, "parallelism=fsdp1_tp micro_batch=6"),
    (4, "parallelism=fsdp2_tp model.experts.number=3 micro_batch=3"),
    (2, "parallelism=fsdp2 parallelism.expert=2"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=2 {FULL}"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=6 {SELECTIVE}"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=2 {SOFTMAX}"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=2 {SELECTIVE} {SOFTMAX}"),
    (2, "parallelism=fsdp2 parallelism.expert=2 parallelism.accumulate=hold parallelism.prefetch=2 micro_batch=2"),
    (2, "parallelism=fsdp2 parallelism.expert=2 parallelism.reshard_after_forward=never"),
    (2, "parallelism=fsdp2 parallelism.expert=2 parallelism.cpu_offload=true"),
    (2, "parallelism=fsdp2 parallelism.expert=2 wrap=root_only"),
    (2, f"parallelism=single {PIPELINE} {ZBV}"),
    (4, f"parallelism=fsdp2 {PIPELINE} {INTERLEAVED} parallelism.expert=2 micro_batch=2 {SELECTIVE}"),
    (4, f"parallelism=tp {PIPELINE} micro_batch=3"),
    (2, "parallelism=fsdp2 parallelism.expert=2 model.freeze=[layers.1.feed_forward.experts.*]"),
    (4, "parallelism=fsdp2 parallelism.expert=2"),
    (4, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=3 {FULL} {SOFTMAX}"),
    (4, "parallelism=fsdp2 parallelism.expert=2 model.experts.number=6"),
    (4, "parallelism=fsdp2 parallelism.expert=4"),
    (4, f"parallelism=fsdp2 parallelism.expert=4 {SELECTIVE}"),
    (4, f"parallelism=fsdp2 parallelism.expert=4 {DOCUMENTS} {FULL}"),
    (4, "parallelism=hsdp2 parallelism.expert=2"),
    (4, f"parallelism=hsdp2 parallelism.expert=2 {FULL} parallelism.accumulate=hold"),
    (2, f"parallelism=ddp {CONTEXT} micro_batch=6"),
    (2, f"parallelism=fsdp2 {CONTEXT} parallelism.expert=2 {SELECTIVE}"),
    (4, f"parallelism=fsdp2 {CONTEXT} {ULYSSES} parallelism.expert=4"),
]


QUICK = (
    (1, f"parallelism=single micro_batch=12 {SELECTIVE}"),
    (2, "parallelism=ddp micro_batch=6"),
    (2, f"parallelism=fsdp1 {FULL} {AS_UNITS}"),
    (4, "parallelism=fsdp2 model.experts.number=6"),
    (2, f"parallelism=tp micro_batch=6 {SOFTMAX}"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=2 {SELECTIVE} {SOFTMAX}"),
    (4, "parallelism=hsdp2 parallelism.expert=2"),
)
"""The others are slow tests."""


def compare(world: int, layout: str, base: tuple[str, ...] = EXPERTS) -> Difference:
    """Train under a layout and under none. Loads and biases have to be equal to the last bit, besides the weights."""
    expected = reference(
        " ".join(word for word in layout.split() if word.startswith(("model", "data", "seq_len"))), base
    )
    ranks = on_ranks(world, observe_experts, (*base, *layout.split()))
    for rank in ranks:
        assert rank["observed"] == pytest.approx(expected["observed"], rel=1e-5)
        assert len(rank["loads"]) == len(rank["biases"]) == (0 if "model.experts=null" in layout else 5)
        for key in ("loads", "biases"):
            for step, (a, b) in enumerate(zip(rank[key], expected[key], strict=True), 1):
                assert torch.equal(a, b), f"{key} of step {step} differ"
    return difference(ranks, expected)


@pytest.mark.slow_cases(
    "2x parallelism=fsdp1 activation_checkpoint=full wrap=rules*",
    "4x parallelism=fsdp2 model.experts.number=6",
    "4x parallelism=hsdp2 parallelism.expert=2",
    "2x parallelism=tp micro_batch=6 model.experts.score=softmax*",
)
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(*each, id=f"{each[0]}x {each[1]}", marks=[] if each in QUICK else [pytest.mark.slow])
        for each in LAYOUTS
    ],
)
def test_experts_equal_one_process(world: int, layout: str) -> None:
    found = compare(world, layout)
    assert max(found) < 1e-5, found


RECOMPUTE = {
    "none": "activation_checkpoint=none",
    "full": "activation_checkpoint=full",
    "selective_op": "activation_checkpoint=selective_op",
    "selective_layer": "activation_checkpoint=selective_layer activation_checkpoint.every=2",
    "memory_budget": "activation_checkpoint=memory_budget activation_checkpoint.budget=0.2",
}
# The partitioner of inductor, which decides what is recomputed, without its code generation.
COMPILED = "compile.backend=aot_eager_decomp_partition"
COMPILES = {
    "eager": "compile=eager",
    "per_block": f"compile=per_block {COMPILED}",
    "whole_model": f"compile=whole_model {COMPILED}",
}


def counted(compilation: str) -> dict[tuple[str, int], list[list[int]]]:
    """(recomputation, micro batches) -> for every step the sum of loads of each block."""
    found = {}
    for name, recompute in RECOMPUTE.items():
        for micro_batches in (1, 3):
            if (compilation, name) == ("eager", "memory_budget"):
                continue  # there is nothing that could keep to it
            words = f"{COMPILES[compilation]} {recompute} micro_batch={12 // micro_batches} steps=2"
            loads = observe_experts((*EXPERTS, "parallelism=single", *words.split()))["loads"]
            found[name, micro_batches] = [each.sum(-1).tolist() for each in loads]
            torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    "compilation", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILES if name != "eager")]
)
def test_every_token_counts_once(compilation: str) -> None:
    found = on_ranks(1, counted, compilation)[0]
    assert len(found) == 8 + 2 * (compilation != "eager")
    for cell, steps in found.items():
        assert steps == [[12 * 34 * 2] * 2] * 2, f"{cell}: {steps}"


SAVED = {
    "single": (1, "parallelism=single micro_batch=12"),
    "ddp-2": (2, "parallelism=ddp"),
    "fsdp1-3": (3, "parallelism=fsdp1"),
    "fsdp2-3": (3, "parallelism=fsdp2"),
    "expert-2": (4, "parallelism=fsdp2 parallelism.expert=2"),
    "expert-4": (4, "parallelism=fsdp2 parallelism.expert=4"),
    "tp-2": (2, "parallelism=tp micro_batch=6"),
}


@pytest.mark.slow
def test_checkpoints_load_under_every_layout(tmp_path: Path) -> None:
    """Parameters, AdamW's state and biases, bit for bit."""
    for name, (world, layout) in SAVED.items():
        tensors = on_ranks(world, checkpoints.save, tmp_path / name, (*EXPERTS, *layout.split()))[0]
        assert tensors == 4 * 38 + 1, "parameters, two moments and the step of each, and the biases"
        assert torch.load(tmp_path / name / "values.pt")["expert_bias"].abs().max() > 5e-3
    for world, layout in SAVED.values():
        folders = [tmp_path / name for name in SAVED]
        for rank in on_ranks(world, checkpoints.load, folders, (*EXPERTS, *layout.split())):
            assert rank == {name: [] for name in SAVED}


def trained(steps: int, folder: Path | None, overrides: tuple[str, ...]) -> tuple[list[float], Tensor]:
    """Losses of the steps that were left to do, and the biases behind them."""
    recorder, saving = Recorder(), ("checkpoint=dcp", "checkpoint.every=1") if folder is not None else ()
    recipe = experiment(*EXPERTS, *overrides, *saving, f"steps={steps}")
    model, _ = pretrain.train(recipe, recorder, device=CPU, nodes=1, workers=dist.get_world_size(), checkpoints=folder)
    loads = network_of(model).loads
    assert loads is not None
    return recorder.losses, loads.bias.clone()


@pytest.mark.slow
def test_a_run_goes_on_with_its_experts_elsewhere(tmp_path: Path) -> None:
    """`parallelism.expert` 2, then 4, then 1: as if nothing had been interrupted."""
    losses: list[float] = []
    for steps, layout in ((2, "parallelism.expert=2"), (4, "parallelism.expert=4"), (6, "parallelism.expert=1")):
        found, biases = on_ranks(4, trained, steps, tmp_path, ("parallelism=fsdp2", layout))[0]
        assert len(found) == 2
        losses += found
    expected, expected_biases = on_ranks(1, trained, 6, None, ("parallelism=single", "micro_batch=12"))[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert torch.equal(biases, expected_biases) and biases.any()


BALANCED = (
    *EXPERTS,
    "parallelism=single",
    "micro_batch=4",
    "global_batch=null",
    "model.experts.balance_rate=1e-3",
    "steps=200",
)


def violations(balance: str) -> list[float]:
    """`experts/mean_violation` of every step."""
    found: list[float] = []

    class Observer(Recorder):
        def step_done(self, step: int, *, observed: Any, **figures: Any) -> None:
            found.append(observed["experts/mean_violation"].item())

    recipe = experiment(*BALANCED, f"model.experts.balance={balance}")
    pretrain.train(recipe, Observer(), device=CPU, nodes=1, workers=1)
    return found


@pytest.mark.slow
def test_biases_keep_experts_equally_busy() -> None:
    """Mean violation of the last 50 of 200 steps."""
    found = {balance: on_ranks(1, violations, balance)[0] for balance in ("bias", "none")}
    bias, none = (sum(each[-50:]) / 50 for each in found.values())
    assert len(found["bias"]) == 200 and bias < 0.8 * none, (bias, none)


def poisoned() -> tuple[bool, bool, int]:
    """Whether a step with a gradient that is not finite left the biases alone; a finite one moved them; tokens then counted."""
    made = checkpoints.assembled(*EXPERTS, "parallelism=fsdp2", "parallelism.expert=2")
    loads, backward = network_of(made.training.model).loads, pretrain.backward
    assert loads is not None

    def poison(*args: Any) -> Tensor:
        loss = backward(*args)
        gradient = made.trained[3].parameter.grad
        assert isinstance(gradient, DTensor)
        if dist.get_rank() == 1:
            gradient.to_local().view(-1)[0] = float("nan")
        return loss

    made.step()
    before = loads.bias.clone()
    with patch.object(pretrain, "backward", poison):
        made.step()
    kept = torch.equal(loads.bias, before)
    made.step()
    return kept, not torch.equal(loads.bias, before), int(loads.tokens.sum())


def test_a_gradient_that_is_not_finite_leaves_biases_alone() -> None:
    assert on_ranks(2, poisoned) == [(True, True, 0)] * 2


COMPILED_EXPERTS = ("steps=5", "compile=per_block", "compile.backend=aot_eager")


def graphs(
    overrides: tuple[str, ...], base: tuple[str, ...] = EXPERTS
) -> tuple[list[int], dict[str, int], list[float]]:
    """Number of compiled graphs after every step, graph breaks, and losses."""
    from torch._dynamo.utils import counters

    found: list[int] = []

    class Counter(Recorder):
        def step_done(self, step: int, **figures: Any) -> None:
            super().step_done(step, **figures)
            found.append(counters["stats"]["unique_graphs"])

    recorder = Counter()
    recipe = experiment(*base, *overrides)
    pretrain.train(recipe, recorder, device=CPU, nodes=1, workers=dist.get_world_size())
    return found, dict(counters["graph_break"]), recorder.losses


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile=whole_model", "compile.fullgraph=false", AS_UNITS])
def test_the_number_of_rows_is_never_a_constant(how: str) -> None:
    """Also where the graph may break: as many graphs after every step."""
    words = (*COMPILED_EXPERTS, "parallelism=fsdp2", "parallelism.expert=2", *how.split())
    for found, _, losses in on_ranks(2, graphs, words):
        assert found == found[:1] * 5, found
        assert losses == pytest.approx(reference("")["losses"], rel=1e-5)


@pytest.mark.slow_cases("2-parallelism=fsdp2 parallelism.expert=2*")
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, f"parallelism=fsdp2 parallelism.expert=2 {SELECTIVE}"),
        pytest.param(1, "parallelism=single micro_batch=12", marks=pytest.mark.slow),
        pytest.param(2, f"parallelism=fsdp2 {FULL}", marks=pytest.mark.slow),
        pytest.param(2, "parallelism=tp micro_batch=6", marks=pytest.mark.slow),
        pytest.param(4, "parallelism=fsdp2 parallelism.expert=2", marks=pytest.mark.slow),
        pytest.param(2, "parallelism=fsdp2 parallelism.expert=2 compile.backend=inductor", marks=pytest.mark.slow),
        pytest.param(
            2, f"parallelism=fsdp2 parallelism.expert=2 {FULL} compile.backend=inductor", marks=pytest.mark.slow
        ),
        pytest.param(2, f"parallelism=fsdp2 {SELECTIVE} compile.backend=inductor", marks=pytest.mark.slow),
    ],
)
def test_blocks_with_experts_are_one_graph_each(world: int, layout: str) -> None:
    """Also those that exchange another number of rows in every step: dense block, block with experts, cross entropy."""
    number = 2 if "tp" in layout else 3  # the cross entropy of split logits is not compiled
    for found, breaks, losses in on_ranks(world, graphs, (*COMPILED_EXPERTS, *layout.split())):
        assert found == [number] * 5 and breaks == {}, (found, breaks)
        assert losses == pytest.approx(reference("")["losses"], rel=1e-5)


@pytest.mark.slow
def test_inductor_keeps_what_is_listed() -> None:
    """A block has 3 grouped products forward and 3 for the gradients of their inputs, and chooses experts once."""

    def calls(operator: str, save: str) -> int:
        option = f"activation_checkpoint=selective_op activation_checkpoint.save={save}"
        words = ("parallelism=fsdp2", "compile=per_block", "model.n_layers=2", *option.split())
        return sum(on_ranks(2, products, (*EXPERTS, *words), f"{operator}.default")[0])

    grouped, topk = "meshrunner.grouped_mm", "aten.topk"
    assert calls(grouped, f"[{{op:{grouped}}}]") == 3 + 3
    assert calls(grouped, f"[{{op:{topk}}}]") == 3 + 3 + 3
    assert calls(topk, f"[{{op:{topk}}}]") == 1
    assert calls(topk, f"[{{op:{grouped}}}]") == 2


def document() -> None:
    """Print docs/measurements/experts.md."""
    print("# Experts under every layout against one process\n")
    print(f"All runs use torch {torch.__version__}, gloo on CPU and fp32. The overrides are `{' '.join(EXPERTS)}`.")
    print("The vocabulary size 509 is prime, so it never divides evenly among ranks.")
    print("Initial weights are bit-equal to those of a run in one process. In each of the five steps, the loads and")
    print("biases of the experts are also bit-equal to those of a run in one process.")
    print(f"In the run in one process, the scores of chosen experts exceed all other scores by more than {NEAR:g},")
    print("so the rounding differences between layouts do not change which experts are chosen.")
    print("`python -m tests.dist.test_experts` prints this table.\n")
    print("The last three columns show the largest relative difference from a run in one process. The column")
    print("`gradient` shows the largest ||difference|| / ||gradient|| of any parameter's gradient before the first")
    print("update. The columns `norm` and `loss` compare the global gradient norm and the loss in five steps of")
    print("AdamW.\n")
    print("| ranks | layout | gradient | norm | loss |\n|---|---|---|---|---|")
    for world, layout in LAYOUTS:
        found = compare(world, layout)
        print(f"| {world} | `{layout}` | {found.gradient:.1e} | {found.norm:.1e} | {found.loss:.1e} |", flush=True)


if __name__ == "__main__":
    document()

"""Activations that blocks keep for backward, and how `show` reports them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from meshrunner.recipes.activation_checkpoint.base import SelectiveOp
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.config.devices import expected_device_type, expected_devices
from meshrunner.runner.ledger.allocations import UNKNOWN
from meshrunner.runner.predict import activations
from meshrunner.runner.predict.activations import (
    BlockKind,
    KeptActivations,
    kept_by_block,
    largest_block_bytes,
    recomputed_blocks,
)
from meshrunner.runner.predict.trace.tracer import Trace, trace_recipe
from tests.composed import SMALL, experiment

FULL, SELECTIVE = "activation_checkpoint=full", "activation_checkpoint=selective_op"
ON_CPU = (*SMALL, "global_batch=null", "hardware=cpu", "launch.workers=2")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def kinds(*overrides: str) -> list[BlockKind]:
    chosen = experiment(*overrides)
    chosen = chosen.on(expected_device_type(chosen.hardware))
    return recomputed_blocks(chosen, expected_devices(chosen), chosen.model.on_meta(chosen.seq_len))


def only(*overrides: str) -> BlockKind:
    (kind,) = kinds(*ON_CPU, *overrides)
    return kind


def traced(*overrides: str) -> Trace:
    chosen = experiment(*ON_CPU, *overrides)
    return trace_recipe(chosen.on("cpu"), nodes=1, workers=chosen.launch.workers, device_type="cpu")


def test_full_keeps_only_the_input() -> None:
    found = only(FULL)
    assert found.kept == KeptActivations(0, {})
    assert found.whole.operators["mm"] == (
        3,
        7,
    )  # the products that a product or an addition follows are not needed again


@pytest.mark.slow
def test_selective_op_keeps_what_is_listed() -> None:
    assert only(SELECTIVE).kept.operators == {ATTENTION: (2, 2), "mm": (4, 7)}
    kept = only(SELECTIVE, "activation_checkpoint.save=[{op:aten.silu}]").kept
    assert kept == KeptActivations(4 * 34 * 100, {"silu": (1, 1)})  # fp32, one sequence of 34, ffn_dim 100


def test_float8_matmuls_are_kept_like_others() -> None:
    option = experiment(SELECTIVE).activation_checkpoint
    assert isinstance(option, SelectiveOp)
    products = torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default
    decide = option.policy()
    kept = [[decide(SimpleNamespace(is_recompute=False), op).name for _ in range(3)] for op in products]
    assert kept == [["MUST_SAVE", "PREFER_RECOMPUTE", "MUST_SAVE"]] * 2


@pytest.mark.slow
def test_bf16_keeps_half_of_it() -> None:
    fp32, bf16 = (
        only(SELECTIVE, "activation_checkpoint.save=[{op:aten.mm}]", f"precision={p}") for p in ("fp32", "bf16")
    )
    assert bf16.kept.nbytes == fp32.kept.nbytes / 2


@pytest.mark.slow
def test_autocast_keeps_the_weights_that_it_has_cast() -> None:
    fp32, bf16 = (only(FULL, "parallelism=ddp", f"precision={p}").whole for p in ("fp32", "bf16"))
    assert "_to_copy" not in fp32.operators and bf16.operators["_to_copy"][0] >= 7


@pytest.mark.slow
def test_tensor_parallelism_keeps_its_share() -> None:
    """Between matmuls a device holds half of the heads and of the width, elsewhere half of the sequence."""
    tensor = ("parallelism=tp", "parallelism.tensor=2", "launch.workers=2", FULL)
    whole, split = only(FULL), only(*tensor)
    assert split.whole.nbytes < 0.6 * whole.whole.nbytes
    of_product = ("activation_checkpoint=selective_op", "activation_checkpoint.save=[{op:aten.silu}]")
    assert only(*tensor[:-1], *of_product).kept.nbytes == 4 * 34 * 100 / 2


@pytest.mark.slow_but("parallelism=tp*")
@pytest.mark.parametrize(
    ("overrides", "stream"),
    [
        (("parallelism=fsdp2",), 4 * 34 * 48),
        (("parallelism=fsdp2", SELECTIVE, "precision=bf16"), 2 * 34 * 48),
        (("parallelism=fsdp1", FULL), 4 * 34 * 48),
        (("parallelism=fsdp1", "precision=bf16"), 0),
        (("parallelism=ddp", FULL, "precision=bf16"), 2 * 34 * 48),
        (("parallelism=tp", "loss=chunked"), 4 * 34 * 48 // 2),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else str(each),
)
def test_a_block_adds_to_memory_what_it_keeps_and_its_input(overrides: tuple[str, ...], stream: int) -> None:
    """Activations when backward begins, of a model of 3 and of one of 4 blocks."""
    held = []
    for blocks in (3, 4):
        found = traced(*overrides, f"model.n_layers={blocks}")
        begins = next(
            allocation
            for allocation in found.ledger.allocations
            if allocation.phase[:2] == (found.last_step, "backward")
        )
        held.append(sum(found.ledger.by_category(begins.allocated_at - 1)[name] for name in UNKNOWN))
        kept = kept_by_block(found)
        assert len(kept) == blocks and len({each.nbytes for each in kept.values()}) == 1
    assert held[1] - held[0] == kept[0].nbytes + stream
    if stream:  # kept behind the last block, too
        assert largest_block_bytes(found) == kept[0].nbytes + stream


@pytest.mark.slow
def test_results_of_a_function_with_its_own_backward_are_kept() -> None:
    dense, experts = kinds(*ON_CPU, "model=moe_tiny", SELECTIVE)
    assert (dense.name, experts.name) == ("Block", "ExpertBlock")
    assert experts.kept.operators["meshrunner.grouped_mm"] == (3, 3)
    assert "meshrunner.grouped_mm" not in dense.kept.operators


@pytest.mark.slow
def test_first_micro_batch_counts() -> None:
    assert kept_by_block(traced("global_batch=6")) == kept_by_block(traced())


@pytest.mark.slow
def test_first_blocks_of_a_hybrid_predict_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []

    def counted(recipe: Any, **how: Any) -> Trace:
        depths.append(recipe.model.n_layers)
        return trace_recipe(recipe, **how)

    monkeypatch.setattr(activations, "trace_recipe", counted)
    long = ("model=hybrid_tiny", "hardware=cpu", "launch.workers=2", FULL, "model.pattern=M-M*M-EM*")
    of_part = kinds(*long)
    assert [kind.name for kind in of_part] == ["MambaBlock", "FeedForwardBlock", "AttentionBlock", "ExpertsBlock"]
    monkeypatch.setattr(activations, "blocks_may_differ", lambda _: True)
    assert kinds(*long) == of_part
    assert depths == [7, 7, 9, 9]
    monkeypatch.undo()
    without_experts = (*long, "activation_checkpoint=selective_layer", "activation_checkpoint.every=5")
    assert kinds(*without_experts) == of_part[:2]


def test_blocks_that_are_frozen_are_not_like_the_others() -> None:
    frozen, last = kinds(*ON_CPU, FULL, "model.freeze=[tok_embeddings.*,layers.0.*,layers.1.*]")
    assert frozen.whole.nbytes < last.whole.nbytes and frozen.kept == last.kept


class Said(NamedTuple):
    """By `show`."""

    overrides: tuple[str, ...]
    line: str


OWN = """
from meshrunner.recipes.model.llama import Llama


class Deep(Llama):
    def at_depth(self, blocks):
        return None


class Looks(Llama):
    def network(self, seq_len):
        network = super().network(seq_len)
        network.norm.register_forward_hook(lambda module, args, output: output.sum().item())
        return network
"""


@pytest.mark.slow_cases("activation_checkpoint=full model.kind=own_kept:Deep")
@pytest.mark.parametrize(
    "said",
    [
        Said(
            (SELECTIVE,),
            "selective_op, 6 of 6 blocks; each keeps 7.03 MiB for backward in addition to its input "
            "(21.04 MiB without recomputation)",
        ),
        Said((FULL, "parallelism.cpu_offload=true"), "is not known: parallelism.cpu_offload moves"),
        Said(
            (FULL, "model.kind=own_kept:Deep", "model.n_layers=65"),
            "is not known: tracing all 65 blocks would take too long",
        ),
        Said((FULL, "model.kind=own_kept:Deep"), "full, 6 of 6 blocks; each keeps only its input for backward"),
        Said((FULL, "model.kind=own_kept:Looks"), "values, but a trace has only shapes: RuntimeError: Tensor.item()"),
        Said(("activation_checkpoint=none",), "recompute: none, 0 of 6 blocks\n"),
    ],
    ids=lambda said: " ".join(said.overrides),
)
def test_show_reports_kept_activations(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_kept.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert cli._dispatch(["show", "hardware=cpu", *said.overrides]) == 0
    assert said.line in capsys.readouterr().out


def test_model_is_not_cut_if_single_blocks_are_named() -> None:
    with pytest.raises(ConfigError, match="all 70 blocks"):
        kinds(*ON_CPU, FULL, "model.n_layers=70", "model.freeze=[layers.1.*]")
    assert len(kinds(*ON_CPU, FULL, "model.n_layers=70", "model.freeze=[tok_embeddings.*]")) == 1


def compiled() -> tuple[BlockKind, BlockKind, str]:
    """Two recomputations of a compiled block; why it is not known of a compiled model."""
    option = ("compile=per_block", "activation_checkpoint=memory_budget")
    assert largest_block_bytes(traced("compile=whole_model")) is None
    found = [only(*option, f"activation_checkpoint.budget={budget}") for budget in (0.5, 0.01)]
    try:
        only(*option, "compile=whole_model")
    except ConfigError as error:
        return found[0], found[1], str(error)
    raise AssertionError("it was known")


@pytest.mark.slow
def test_compiled_blocks_keep_what_the_compiler_decides() -> None:
    """In a process of its own: this one does without the compiler."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        half, little, why = pool.apply(compiled)
    assert half.whole == little.whole and half.whole.nbytes > half.kept.nbytes > little.kept.nbytes
    assert half.whole.nbytes < only(FULL).whole.nbytes, "eager code keeps more"
    assert why == "the whole model is compiled at once, so its blocks cannot be told apart"

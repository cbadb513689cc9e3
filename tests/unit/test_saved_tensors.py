"""What a block keeps for backward, on fake tensors."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from meshrunner.recipes.activation_checkpoint.saved_tensors import SavedTensors, saved_by_block
from meshrunner.recipes.activation_checkpoint.selective_op import SelectiveOp
from meshrunner.runner.config.experiment import Experiment
from tests.composed import SMALL, experiment

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def saved(chosen: Experiment) -> tuple[SavedTensors, SavedTensors]:
    return saved_by_block(
        chosen.activation_checkpoint,
        "layers.0",
        lambda: chosen.model.build(chosen.seq_len),
        (chosen.micro_batch, chosen.seq_len),
        None if chosen.parallelism.autocasts else chosen.precision.param_dtype,
        lambda: chosen.parallelism.computing(chosen.precision, "cpu"),
    )


def test_full_keeps_nothing_but_the_input() -> None:
    whole, kept = saved(experiment(*SMALL, "activation_checkpoint=full"))
    assert kept.nbytes == 0 and kept.operators == {}
    assert whole.operators["mm"] == (3, 7)  # the products that a product or an addition follows are not needed again


def test_selective_op_keeps_what_is_listed() -> None:
    option = "activation_checkpoint=selective_op"
    _, kept = saved(experiment(*SMALL, option))
    assert kept.operators == {ATTENTION: (2, 2), "mm": (4, 7)}
    _, kept = saved(experiment(*SMALL, option, "activation_checkpoint.save=[{op:aten.silu}]"))
    assert kept.operators == {"silu": (1, 1)}
    assert kept.nbytes == 4 * 34 * 100  # fp32, one sequence of 34, ffn_dim 100


def test_products_in_float8_are_kept_like_others() -> None:
    option = experiment("activation_checkpoint=selective_op").activation_checkpoint
    assert isinstance(option, SelectiveOp)
    products = torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default
    decide = option.policy()
    kept = [[decide(SimpleNamespace(is_recompute=False), op).name for _ in range(3)] for op in products]
    assert kept == [["MUST_SAVE", "PREFER_RECOMPUTE", "MUST_SAVE"]] * 2


def test_bf16_keeps_half_of_it() -> None:
    option = ("activation_checkpoint=selective_op", "activation_checkpoint.save=[{op:aten.mm}]")
    fp32, bf16 = (saved(experiment(*SMALL, *option, f"precision={p}"))[1].nbytes for p in ("fp32", "bf16"))
    assert bf16 == fp32 / 2


def test_autocast_keeps_what_it_computes_with_in_bf16() -> None:
    option = ("activation_checkpoint=selective_op", "activation_checkpoint.save=[{op:aten.mm}]", "parallelism=ddp")
    fp32, bf16 = (saved(experiment(*SMALL, *option, f"precision={p}")) for p in ("fp32", "bf16"))
    assert bf16[1].operators == fp32[1].operators and bf16[1].nbytes == fp32[1].nbytes / 2
    assert bf16[0].operators["_to_copy"][0] >= 7, "every weight that autocast has cast, until backward"

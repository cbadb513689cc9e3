"""Memory at full depth from two shallow traces equals that of the trace at full depth, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from meshrunner.runner.predict.trace.depth import extrapolate, shallow_depths, start_peak, step_peak
from meshrunner.runner.predict.trace.tracer import trace_depths, trace_recipe
from tests.composed import experiment

DEEP = (
    "data=random model.n_layers=12 model.dim=64 model.n_heads=4 model.n_kv_heads=4 model.ffn_dim=128 model.vocab_size=512 "
    "seq_len=32 micro_batch=2"
)
TINY_BATCH = "seq_len=16 micro_batch=1 model.n_layers=40"  # the peak is where most gradients exist
FULL = "activation_checkpoint=full"
CASES = {
    "fsdp2": "parallelism=fsdp2",
    "end of backward": f"parallelism=fsdp2 {FULL} {TINY_BATCH}",
    "selective_layer": "parallelism=fsdp2 activation_checkpoint=selective_layer activation_checkpoint.every=2",
    "prefetch": f"parallelism=fsdp2 {FULL} parallelism.prefetch=3",
    "fsdp1": f"parallelism=fsdp1 {FULL} {TINY_BATCH}",
    "accumulation": "parallelism=hsdp2 micro_batch=1 global_batch=16",
    "rules": f"parallelism=fsdp2 {FULL} wrap=rules parallelism.reshard_after_forward=except_last",
    "tied": "parallelism=fsdp2 model.tie_embeddings=true",
    "one rank, tied": "parallelism=single launch.workers=1 model.tie_embeddings=true",
    "frozen": "parallelism=fsdp2 model.freeze=[tok_embeddings.*,layers.*.attention.*]",
    "compiled": "parallelism=fsdp2 compile=per_block micro_batch=1 global_batch=32",
    "compiled, tensor parallel": "parallelism=fsdp2_tp compile=per_block activation_checkpoint=selective_op",
}


@pytest.mark.slow_but("fsdp2")
@pytest.mark.parametrize("case", CASES)
def test_shallow_models_predict_the_memory_of_a_deep_one(case: str) -> None:
    recipe = experiment("launch.workers=8", *DEEP.split(), *CASES[case].split()).on("cuda")
    workers = recipe.launch.workers
    assert isinstance(workers, int)
    setting: Any = {"nodes": 1, "workers": workers, "device_type": "cuda"}
    blocks = recipe.model.n_layers  # type: ignore[attr-defined]
    depths = shallow_depths(recipe, blocks)
    assert depths is not None and depths.deeper < blocks
    shallow, deeper = trace_depths(
        [recipe.model_copy(update={"model": recipe.model.at_depth(each)}) for each in depths[:2]], **setting
    )
    (start, peak), full = extrapolate(depths, shallow, deeper), trace_recipe(recipe, **setting)
    expected = step_peak(full)
    assert peak.total == expected.total and peak.by_category == expected.by_category
    assert str(peak.phase) == str(expected.phase)
    assert start == start_peak(full)
    if case == "end of backward":  # extrapolating whole phases would miss it
        assert expected.phase is not None and expected.phase.part == "backward" and expected.phase.block in (0, 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.freeze=[layers.1.*]"],
        ["wrap=rules", "wrap.rules=[{match:layers.*},{match:layers.1.attention},{match:'*',wrap:false}]"],
        ["model.n_layers=40", "model.freeze=[layers.?.attention.*]"],
        ["model=hybrid_tiny"],
        ["model.n_layers=40", "parallelism=ddp"],
        ["model.n_layers=40", "parallelism=fsdp1", "wrap=root_only"],
        ["model.n_layers=40", "parallelism=fsdp2", "compile=whole_model"],
        ["model.n_layers=4"],
        ["model.n_layers=40", "activation_checkpoint=selective_layer", "activation_checkpoint.every=9"],
    ],
    ids=lambda each: each[-1],
)
def test_no_shallow_depths_where_only_the_full_depth_is_exact(overrides: list[str]) -> None:
    recipe = experiment(*overrides)
    blocks = len(recipe.model.on_meta(recipe.seq_len).block_names())
    assert shallow_depths(recipe, blocks) is None

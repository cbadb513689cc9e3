"""Combinations of options that cannot work with pipeline parallelism. Torch runs some of these combinations without an error, but
with wrong gradients. A schedule that splits backward computes weight gradients later than activation gradients."""

from meshrunner.recipes.compatibility.conflict import Conflict
from meshrunner.recipes.parallelism.base import Degrees, Parallelism
from meshrunner.recipes.parallelism.wrap_policy import Rules
from meshrunner.recipes.recipe import Recipe

SPLIT = "interleaved_zero_bubble, zbv and dualpipe_v"
WHOLE_BACKWARD = "parallelism.pipeline_schedule=interleaved_1f1b"


def _splits(p: Parallelism) -> bool:
    return p.pipeline > 1 and p.schedule.splits_backward


def _reshards(r: Recipe, p: Parallelism, d: Degrees) -> bool:
    """Whether any FSDP2 unit frees its parameters after forward."""
    if p.kind != "fsdp2" or r.wrap.kind == "root_only":
        return False
    rules = [rule.reshard_after_forward for rule in r.wrap.rules] if isinstance(r.wrap, Rules) else []
    return any((own or p.reshard(d.shard)) != "never" for own in (None, *rules))


ROWS = [
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and p.kind == "fsdp1",
        where="parallelism.pipeline",
        reason="FSDP1 fails in the backward of a pipeline stage",
        instead="parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and p.kind == "megatron_fsdp",
        where="parallelism.pipeline",
        reason="torch's pipelines cannot make megatron_fsdp reduce gradients only after the last micro batch",
        instead="parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and p.plans_buffers,
        where="parallelism.buffers",
        reason="planned buffers need a fixed order of units, but a pipeline schedule alternates between stages",
        instead="parallelism.buffers=dynamic",
    ),
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and r.model.ties_embeddings,
        where="model.tie_embeddings",
        reason="the embedding is in the first pipeline stage and the output projection in the last",
        instead="model.tie_embeddings=false, or parallelism.pipeline=1",
    ),
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and r.data.separates_documents,
        where="data.documents",
        reason="attention within documents needs the tokens, which only the first pipeline stage gets",
        instead="data.documents=joined, or parallelism.pipeline=1",
    ),
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and r.compile.cuda_graph,
        where="compile.cuda_graph",
        reason="a pipeline waits for other devices in every step, which a CUDA graph cannot capture",
        instead="compile.cuda_graph=false, or parallelism.pipeline=1",
    ),
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and r.compile.kind == "whole_model",
        where="compile",
        reason="whole_model compiles the full model, but a pipeline stage is only a part of the model",
        instead="compile=per_block",
    ),
    Conflict(
        when=lambda r, p, d: _splits(p) and p.kind == "ddp" and d.replicate > 1,
        where="parallelism.pipeline_schedule",
        reason=f"{SPLIT} compute weight gradients outside of autograd's backward, so DDP would never reduce them",
        instead=f"{WHOLE_BACKWARD}, or parallelism=fsdp2 parallelism.reshard_after_forward=never",
    ),
    Conflict(
        when=lambda r, p, d: _splits(p) and _reshards(r, p, d),
        where="parallelism.reshard_after_forward",
        reason=f"{SPLIT} lose the gradients of FSDP2 units whose parameters are freed after forward",
        instead=f"parallelism.reshard_after_forward=never for every unit, or {WHOLE_BACKWARD}",
    ),
    Conflict(
        when=lambda r, p, d: _splits(p) and r.activation_checkpoint.kind != "none",
        where="activation_checkpoint",
        reason=f"{SPLIT} either fail, or recompute each block several times (once for each group of its weights)",
        instead=f"activation_checkpoint=none, or {WHOLE_BACKWARD}",
    ),
    Conflict(
        when=lambda r, p, d: _splits(p) and r.compile.compiles,
        where="compile",
        reason=f"{SPLIT} repeat the backward of a compiled block, because the backward cannot be split",
        instead=f"compile=eager, or {WHOLE_BACKWARD}",
    ),
]

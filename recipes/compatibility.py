"""Combinations of options that cannot work, and why: one flat table.

The check, sweeps, the documentation and the tests all read it. `Parallelism.degrees` checks degrees against devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from meshrunner.recipes.parallelism.base import Degrees
from meshrunner.recipes.parallelism.megatron_fsdp import MegatronFSDP
from meshrunner.recipes.precision.float8 import ALIGNMENT
from meshrunner.recipes.recipe import Recipe


class Conflict(NamedTuple):
    """A combination that cannot work."""

    when: Callable[[Recipe, Degrees], bool]
    where: str
    """The configuration path to change."""
    reason: str
    instead: str
    """The nearest combination that works."""


TABLE = [
    Conflict(
        when=lambda r, d: r.parallelism.kind == "single" and math.prod(d) > 1,
        where="parallelism",
        reason="single is one device",
        instead="launch.workers=1, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.kind in ("single", "ddp") and r.precision.kind == "float8",
        where="precision",
        reason="float8 takes weights that FSDP hands it in bf16; single and ddp keep them in fp32, for autocast",
        instead="precision=bf16, or parallelism=fsdp2 parallelism.shard=1 with as many parallelism.replicate as devices",
    ),
    Conflict(
        when=lambda r, _: r.precision.compute == "fp8" and r.micro_batch * r.seq_len % ALIGNMENT > 0,
        where="micro_batch",
        reason=f"float8 products add up over the tokens of a micro batch, and need multiples of {ALIGNMENT}",
        instead=f"a multiple of {ALIGNMENT} for micro_batch x seq_len, or precision=bf16",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.kind in ("single", "ddp") and r.precision.reduce_bytes < 4,
        where="precision.reduce",
        reason="ddp reduces gradients in the dtype of its parameters, fp32, and single has none to reduce",
        instead="precision.reduce=fp32, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, _: r.activation_checkpoint.kind == "memory_budget" and not r.compile.compiles,
        where="activation_checkpoint",
        reason="the compiler enforces the memory budget, and nothing is compiled",
        instead="compile=per_block, or activation_checkpoint=selective_op",
    ),
    Conflict(
        when=lambda r, d: r.compile.kind == "whole_model" and d.tensor > 1,
        where="compile",
        reason="torch cannot trace the embedding once tensor parallelism has split its table",
        instead="compile=per_block",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.wraps_units and r.compile.records_cuda_graphs,
        where="compile.mode",
        reason="reduce-overhead and max-autotune replay CUDA graphs, for which FSDP's gathered parameters would have to stay "
        "at one address",
        instead="compile.mode=max-autotune-no-cudagraphs, or parallelism=ddp",
    ),
    Conflict(
        when=lambda r, d: d.tensor > 1 and r.compile.is_partitioned and r.activation_checkpoint.kind == "memory_budget",
        where="activation_checkpoint",
        reason="torch's knapsack partitioner cannot handle the device mesh in a block that tensor parallelism has split",
        instead="activation_checkpoint=selective_op",
    ),
    Conflict(
        when=lambda r, d: d.tensor > 1 and r.compile.is_partitioned and r.activation_checkpoint.recomputes_attention,
        where="activation_checkpoint.save",
        reason="to recompute attention in a compiled tensor-parallel block, torch would have to save the device mesh",
        instead="a list with the attention operators, activation_checkpoint=full, or compile=eager",
    ),
    Conflict(
        when=lambda r, _: r.precision.gathers_float8 and r.parallelism.kind != "fsdp2",
        where="precision.all_gather",
        reason="only FSDP2 can all-gather weights in float8",
        instead="parallelism=fsdp2, or precision.all_gather=false",
    ),
    Conflict(
        when=lambda r, _: r.precision.gathers_float8 and r.precision.scales_rows,
        where="precision.all_gather",
        reason="the scale of a row is not known until its shards are gathered",
        instead="precision.scaling=tensorwise, or precision.all_gather=false",
    ),
    Conflict(
        when=lambda r, d: r.parallelism.kind == "ddp" and d.tensor > 1,
        where="parallelism.tensor",
        reason="DDP would all-reduce tensor-parallel shards as if they were whole parameters",
        instead="parallelism=fsdp2 parallelism.shard=1 with parallelism.replicate",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.kind == "fsdp1" and isinstance(r.parallelism.reshard_after_forward, int),
        where="parallelism.reshard_after_forward",
        reason="FSDP1 either keeps a unit's parameters gathered after forward or reshards them fully",
        instead="parallelism=fsdp2, or always, never, except_last",
    ),
    Conflict(
        when=lambda r, d: r.parallelism.kind == "fsdp1" and d.shard == 1 and d.tensor > 1,
        where="parallelism.shard",
        reason="with a single shard, FSDP1 cannot restore parameters that tensor parallelism has split",
        instead="parallelism.shard of at least 2, or parallelism=tp",
    ),
    Conflict(
        when=lambda r, d: r.parallelism.kind == "fsdp1" and d.shard == 1 and d.replicate > 1,
        where="parallelism.replicate",
        reason="FSDP1 does not synchronise replicas of one device each: torch would train independent models",
        instead="parallelism.shard of at least 2, parallelism=hsdp2, or parallelism=ddp",
    ),
    Conflict(
        when=lambda r, d: (
            r.parallelism.kind == "fsdp1"
            and d.tensor > 1
            and r.parallelism.accumulate == "hold"
            and r.accumulation(d.data)[1] > 1
        ),
        where="parallelism.accumulate",
        reason="FSDP1 cannot hold whole gradients of parameters that tensor parallelism has split",
        instead="parallelism.accumulate=reduce, or parallelism=fsdp2_tp",
    ),
    Conflict(
        when=lambda r, d: r.parallelism.kind == "fsdp1" and d.tensor > 1 and r.model.ties_embeddings,
        where="model.tie_embeddings",
        reason="FSDP1 does not keep parameters tied once tensor parallelism has split them",
        instead="parallelism=fsdp2_tp",
    ),
    Conflict(
        when=lambda r, d: d.tensor > 1 and r.parallelism.sequence_parallel and r.seq_len % d.tensor > 0,
        where="seq_len",
        reason="sequence parallelism splits every sequence evenly, and parallelism.tensor does not divide seq_len",
        instead="parallelism.sequence_parallel=false, or a multiple of parallelism.tensor",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.expert > 1 and r.parallelism.kind != "fsdp2",
        where="parallelism.expert",
        reason="only FSDP2 can shard the experts of a unit over other devices than the rest of it",
        instead="parallelism=fsdp2, or parallelism.expert=1",
    ),
    Conflict(
        when=lambda r, d: r.parallelism.expert > 1 and d.tensor > 1,
        where="parallelism.expert",
        reason="tokens are exchanged whole, and tensor parallelism splits the experts they would be sent to",
        instead="parallelism.expert=1, or parallelism.tensor=1",
    ),
    Conflict(
        when=lambda r, _: (
            r.parallelism.expert > 1 and r.compile.is_partitioned and r.activation_checkpoint.kind == "memory_budget"
        ),
        where="activation_checkpoint",
        reason="torch's knapsack partitioner cannot handle the process group of a block that exchanges tokens",
        instead="activation_checkpoint=selective_op",
    ),
    Conflict(
        when=lambda r, _: (
            r.parallelism.expert > 1
            and r.compile.is_partitioned
            and r.activation_checkpoint.inside_compile
            and r.activation_checkpoint.repeats_exchange
        ),
        where="activation_checkpoint.save",
        reason="to exchange tokens again in a compiled block, torch would have to save their numbers",
        instead="a list with _c10d_functional.all_to_all_single, activation_checkpoint=full, or compile=eager",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.expert > 1 and isinstance(r.parallelism.reshard_after_forward, int),
        where="parallelism.reshard_after_forward",
        reason="experts are sharded over fewer devices than the rest of a unit, and one number cannot be for both",
        instead="always, never, except_last",
    ),
    Conflict(
        when=lambda r, _: r.seq_len <= r.model.tokens_ahead,
        where="model.mtp.depth",
        reason="a sequence has no token that far behind its first",
        instead="a longer seq_len, or fewer predicted tokens",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.expert > 1 and r.parallelism.plans_buffers,
        where="parallelism.buffers",
        reason="with experts on a mesh of their own a unit gathers and reduces over two groups, which torch lets nobody plan",
        instead="parallelism.buffers=dynamic, or parallelism.expert=1",
    ),
    Conflict(
        when=lambda r, _: r.parallelism.kind == "megatron_fsdp" and r.precision.kind == "float8",
        where="precision",
        reason="megatron_fsdp knows the float8 of Transformer Engine alone",
        instead="precision=bf16, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, d: r.parallelism.kind == "megatron_fsdp" and d.tensor > 1,
        where="parallelism.tensor",
        reason="megatron_fsdp takes the local part of a gradient for all of it, and under tensor parallelism that of a norm is "
        "one of several to be added up",
        instead="parallelism.tensor=1, or parallelism=fsdp2_tp",
    ),
    Conflict(
        when=lambda r, _: (
            r.parallelism.kind == "megatron_fsdp"
            and r.parallelism.reshard_after_forward not in ("auto", r.parallelism.reshard(2))
        ),
        where="parallelism.reshard_after_forward",
        reason="megatron_fsdp frees all units after forward with zero 3, and has whole parameters with zero 0 to 2",
        instead="parallelism.reshard_after_forward=auto with the parallelism.zero that is meant",
    ),
    Conflict(
        when=lambda r, _: (
            isinstance(r.parallelism, MegatronFSDP) and r.parallelism.zero >= 2 and r.parallelism.accumulate == "hold"
        ),
        where="parallelism.accumulate",
        reason="megatron_fsdp reduces gradients in every micro batch where devices share them out, which is zero 2 and 3",
        instead="parallelism.accumulate=reduce, or parallelism.zero=1",
    ),
    Conflict(
        when=lambda r, _: (
            isinstance(r.parallelism, MegatronFSDP) and r.parallelism.zero < 2 and r.parallelism.double_buffer != "none"
        ),
        where="parallelism.double_buffer",
        reason="buffers are for gathered parameters and unreduced gradients, and with zero 0 and 1 both are whole all the time",
        instead="parallelism.double_buffer=none, or parallelism.zero of 2 or 3",
    ),
    Conflict(
        when=lambda r, _: (
            isinstance(r.parallelism, MegatronFSDP)
            and r.parallelism.nccl_registration
            and r.parallelism.double_buffer == "none"
        ),
        where="parallelism.nccl_registration",
        reason="NCCL registers memory that stays, and without double buffers it is freed with every unit",
        instead="parallelism.double_buffer=max_pool or fixed, or parallelism.nccl_registration=false",
    ),
    Conflict(
        when=lambda r, _: (
            r.parallelism.kind == "megatron_fsdp" and (r.checkpoint.saves or r.checkpoint.load is not None)
        ),
        where="checkpoint",
        reason="the shards of megatron_fsdp end where its buckets do, and checkpoints are of parameters that are cut evenly",
        instead="checkpoint=none, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, _: r.deterministic and r.compile.autotunes,
        where="compile.mode",
        reason="autotuning takes the kernel that was the fastest this time, and another one rounds in another way",
        instead="compile.mode=default, or deterministic=false",
    ),
]


def problems(recipe: Recipe, degrees: Degrees) -> list[str]:
    """A sentence for every row of the table that applies."""
    return [f"{row.where}: {row.reason}; use {row.instead}" for row in TABLE if row.when(recipe, degrees)]


def markdown_table() -> str:
    """The table as docs/compatibility.md shows it: `python -m meshrunner.recipes.compatibility > docs/compatibility.md`."""
    lines = ["# What cannot be combined", "", "| setting | why | what works |", "|---|---|---|"]
    lines += [f"| `{row.where}` | {row.reason} | {row.instead} |" for row in TABLE]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())

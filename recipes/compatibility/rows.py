"""Combinations of options that cannot work, except those with pipelines."""

from meshrunner.recipes.compatibility.conflict import Conflict
from meshrunner.recipes.model.hybrid.hybrid import only_atomic_sums
from meshrunner.recipes.parallelism.fsdp2 import FSDP2
from meshrunner.recipes.parallelism.megatron_fsdp import MegatronFSDP
from meshrunner.recipes.weights.initial import loads_checkpoint

ROWS = [
    Conflict(
        when=lambda r, p, d: p.kind == "single" and d.devices > d.pipeline,
        where="parallelism",
        reason="parallelism=single trains on one device",
        instead="launch.workers=1, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, p, d: r.model.weights is not None and r.checkpoint.load is not None,
        where="model.weights",
        reason="a run starts either from initial weights or from a checkpoint",
        instead="model.weights=null, or checkpoint.load=null",
    ),
    Conflict(
        when=lambda r, p, d: p.autocasts and r.precision.kind == "float8",
        where="precision",
        reason="float8 needs weights that FSDP has cast to bf16, but single and ddp keep fp32 weights and use autocast",
        instead="precision=bf16, or parallelism=fsdp2 parallelism.shard=1 with parallelism.replicate=NUMBER_OF_DEVICES",
    ),
    Conflict(
        when=lambda r, p, d: r.micro_batch * r.seq_len // d.context % r.precision.token_alignment > 0,
        where="micro_batch",
        reason="in float8 matmuls, the number of tokens per rank in a micro batch must be a multiple of 16 (mxfp8: 32)",
        instead="a multiple of 16 (mxfp8: 32) for micro_batch x seq_len / context, or precision=bf16",
    ),
    Conflict(
        when=lambda r, p, d: p.autocasts and r.precision.reduce_bytes < 4,
        where="precision.reduce",
        reason="ddp reduces gradients in fp32, the dtype of its parameters, and single has no gradients to reduce",
        instead="precision.reduce=fp32, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, p, d: r.activation_checkpoint.kind == "memory_budget" and not r.compile.compiles,
        where="activation_checkpoint",
        reason="the compiler enforces the memory budget, but nothing is compiled",
        instead="compile=per_block, or activation_checkpoint=selective_op",
    ),
    Conflict(
        when=lambda r, p, d: r.compile.kind == "whole_model" and d.tensor > 1,
        where="compile",
        reason="torch cannot trace an embedding table that tensor parallelism has split",
        instead="compile=per_block",
    ),
    Conflict(
        when=lambda r, p, d: p.wraps_units and r.compile.records_cuda_graphs,
        where="compile.mode",
        reason="reduce-overhead and max-autotune replay CUDA graphs, which need FSDP's gathered parameters at fixed addresses",
        instead="compile.mode=max-autotune-no-cudagraphs, or parallelism=ddp",
    ),
    Conflict(
        when=lambda r, p, d: r.compile.records_cuda_graphs and r.accumulation(d.data)[1] > 1,
        where="compile.mode",
        reason="reduce-overhead and max-autotune replay CUDA graphs, which overwrite the gradients of earlier micro batches",
        instead="compile.mode=max-autotune-no-cudagraphs, or micro_batch = global_batch / data-parallel ranks",
    ),
    Conflict(
        when=lambda r, p, d: r.compile.cuda_graph and not p.capturable,
        where="compile.cuda_graph",
        reason=(
            "in every step, the host waits for events or token counts (DDP, FSDP1, megatron_fsdp, expert > 1), "
            "checks or allocates buffers (parallelism.buffers other than dynamic), or updates parameters (cpu_offload)"
        ),
        instead="parallelism=single, or fsdp2 with expert=1, buffers=dynamic and cpu_offload=false",
    ),
    Conflict(
        when=lambda r, p, d: r.compile.cuda_graph and r.precision.kind == "fp32" and r.model.inactive_parameters() > 0,
        where="compile.cuda_graph",
        reason="with experts in fp32, the host must read each expert's token count from the device",
        instead="precision=bf16, or compile.cuda_graph=false",
    ),
    Conflict(
        when=lambda r, p, d: r.compile.cuda_graph and not r.optimizer.capturable,
        where="compile.cuda_graph",
        reason="only the fused AdamW keeps the learning rate, the step count and the check for finite gradients on the device",
        instead="optimizer=adamw optimizer.implementation=fused, or compile.cuda_graph=false",
    ),
    Conflict(
        when=lambda r, p, d: (
            r.optimizer.gathers_matrices and (p.kind == "fsdp1" or isinstance(p, MegatronFSDP) or p.offloads)
        ),
        where="optimizer",
        reason=(
            "muon gathers every matrix on the device, but fsdp1 and megatron_fsdp shard flattened units, "
            "and cpu_offload stores matrices on the host"
        ),
        instead="optimizer=adamw, or parallelism=fsdp2 with cpu_offload=false",
    ),
    Conflict(
        when=lambda r, p, d: r.compile.cuda_graph and r.compile.records_cuda_graphs,
        where="compile.mode",
        reason="reduce-overhead and max-autotune replay their own CUDA graphs, which a captured step cannot contain",
        instead="compile.mode=max-autotune-no-cudagraphs, or compile.cuda_graph=false",
    ),
    Conflict(
        when=lambda r, p, d: (
            r.compile.async_tensor_parallel and not (r.compile.is_partitioned and d.tensor > 1 and p.sequence_parallel)
        ),
        where="compile.async_tensor_parallel",
        reason="inductor overlaps matmuls only with the all-gathers and reduce-scatters of sequence parallelism",
        instead="compile=per_block with parallelism=fsdp2_tp or tp, or compile.async_tensor_parallel=false",
    ),
    Conflict(
        when=lambda r, p, d: (
            max(d.tensor, p.expert, d.context) > 1
            and r.compile.is_partitioned
            and r.activation_checkpoint.kind == "memory_budget"
        ),
        where="activation_checkpoint",
        reason=(
            "memory_budget uses torch's knapsack partitioner, which cannot handle blocks with process groups of "
            "tensor, expert or context parallelism"
        ),
        instead="activation_checkpoint=selective_op",
    ),
    Conflict(
        when=lambda r, p, d: d.tensor > 1 and r.compile.is_partitioned and r.activation_checkpoint.recomputes_attention,
        where="activation_checkpoint.save",
        reason="recomputing attention in a compiled tensor-parallel block needs the device mesh, which torch cannot save",
        instead="compile=eager, activation_checkpoint=full, or a save list that includes the attention operators",
    ),
    Conflict(
        when=lambda r, p, d: r.precision.gathers_float8 and not isinstance(p, FSDP2),
        where="precision.all_gather",
        reason="only FSDP2 can all-gather weights in float8",
        instead="parallelism=fsdp2, or precision.all_gather=false",
    ),
    Conflict(
        when=lambda r, p, d: r.precision.gathers_float8 and r.precision.scales_rows,
        where="precision.all_gather",
        reason="rowwise scales are unknown until the shards of a weight are gathered",
        instead="precision.scaling=tensorwise, or precision.all_gather=false",
    ),
    Conflict(
        when=lambda r, p, d: p.kind == "ddp" and d.tensor > 1,
        where="parallelism.tensor",
        reason="DDP would all-reduce tensor-parallel shards as if they were whole parameters",
        instead="parallelism=fsdp2 parallelism.shard=1 with parallelism.replicate=NUMBER_OF_REPLICAS",
    ),
    Conflict(
        when=lambda r, p, d: p.kind == "fsdp1" and isinstance(p.reshard_after_forward, int),
        where="parallelism.reshard_after_forward",
        reason="FSDP1 either keeps a unit's parameters gathered after forward or reshards them fully",
        instead="parallelism.reshard_after_forward=always, never or except_last, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, p, d: p.kind == "fsdp1" and d.shard == 1 and d.tensor > 1,
        where="parallelism.shard",
        reason="with a single shard, FSDP1 cannot restore parameters that tensor parallelism has split",
        instead="parallelism.shard of at least 2, or parallelism=tp",
    ),
    Conflict(
        when=lambda r, p, d: p.kind == "fsdp1" and d.shard == 1 and d.replicate > 1,
        where="parallelism.replicate",
        reason="FSDP1 does not synchronise single-device replicas, so every replica would train a different model",
        instead="parallelism.shard of at least 2, parallelism=hsdp2, or parallelism=ddp",
    ),
    Conflict(
        when=lambda r, p, d: (
            p.kind == "fsdp1" and d.tensor > 1 and p.accumulate == "hold" and r.accumulation(d.data)[1] > 1
        ),
        where="parallelism.accumulate",
        reason="FSDP1 cannot hold unsharded gradients of parameters that tensor parallelism has split",
        instead="parallelism.accumulate=reduce, or parallelism=fsdp2_tp",
    ),
    Conflict(
        when=lambda r, p, d: p.kind == "fsdp1" and d.tensor > 1 and r.model.ties_embeddings,
        where="model.tie_embeddings",
        reason="FSDP1 does not keep parameters tied once tensor parallelism has split them",
        instead="parallelism=fsdp2_tp",
    ),
    Conflict(
        when=lambda r, p, d: d.tensor > 1 and p.sequence_parallel and r.seq_len % d.tensor > 0,
        where="seq_len",
        reason="sequence parallelism splits every sequence evenly, but parallelism.tensor does not divide seq_len",
        instead="parallelism.sequence_parallel=false, or a seq_len that is a multiple of parallelism.tensor",
    ),
    Conflict(
        when=lambda r, p, d: d.context > 1 and r.seq_len % p.sequence_pieces > 0,
        where="seq_len",
        reason=(
            "each sequence is cut into N equal pieces: N = context for ulysses, 2 x context for allgather; "
            "with sequence_parallel=true, N is also multiplied by tensor"
        ),
        instead="a seq_len that is a multiple of N",
    ),
    Conflict(
        when=lambda r, p, d: d.context > 1 and r.data.separates_documents,
        where="data.documents",
        reason="a device that holds a part of each sequence does not know where the documents of the other parts end",
        instead="data.documents=joined, or parallelism.context=1",
    ),
    Conflict(
        when=lambda r, p, d: p.expert > 1 and not isinstance(p, FSDP2),
        where="parallelism.expert",
        reason="only FSDP2 can shard a unit's experts over different devices than the rest of the unit",
        instead="parallelism=fsdp2, or parallelism.expert=1",
    ),
    Conflict(
        when=lambda r, p, d: p.expert > 1 and d.tensor > 1,
        where="parallelism.expert",
        reason="tokens are sent to the single device that holds an expert, but tensor parallelism splits each expert",
        instead="parallelism.expert=1, or parallelism.tensor=1",
    ),
    Conflict(
        when=lambda r, p, d: (
            p.expert > 1
            and r.compile.is_partitioned
            and r.activation_checkpoint.inside_compile
            and r.activation_checkpoint.repeats_exchange
        ),
        where="activation_checkpoint.save",
        reason=(
            "recomputing the token exchange of experts in a compiled block needs the token counts, "
            "which torch cannot save"
        ),
        instead="compile=eager, activation_checkpoint=full, or a save list that includes _c10d_functional.all_to_all_single",
    ),
    Conflict(
        when=lambda r, p, d: p.expert > 1 and isinstance(p.reshard_after_forward, int),
        where="parallelism.reshard_after_forward",
        reason="experts are sharded over fewer devices than the rest of a unit, so no single number of devices fits both",
        instead="parallelism.reshard_after_forward=always, never or except_last",
    ),
    Conflict(
        when=lambda r, p, d: r.seq_len <= r.model.tokens_ahead,
        where="model.mtp.depth",
        reason="seq_len must be greater than the number of tokens predicted ahead",
        instead="a longer seq_len, or a smaller model.mtp.depth",
    ),
    Conflict(
        when=lambda r, p, d: p.expert > 1 and p.plans_buffers,
        where="parallelism.buffers",
        reason="a unit with experts gathers and reduces over two process groups, but planned buffers support only one",
        instead="parallelism.buffers=dynamic, or parallelism.expert=1",
    ),
    Conflict(
        when=lambda r, p, d: isinstance(p, MegatronFSDP) and r.precision.kind == "float8",
        where="precision",
        reason="megatron_fsdp supports float8 only through Transformer Engine",
        instead="precision=bf16, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, p, d: isinstance(p, MegatronFSDP) and d.tensor > 1,
        where="parallelism.tensor",
        reason="megatron_fsdp treats local gradients as complete, but tensor parallelism must sum the gradients of norm layers",
        instead="parallelism.tensor=1, or parallelism=fsdp2_tp",
    ),
    Conflict(
        when=lambda r, p, d: isinstance(p, MegatronFSDP) and p.reshard_after_forward not in ("auto", p.reshard(2)),
        where="parallelism.reshard_after_forward",
        reason="megatron_fsdp reshards every unit after forward with zero=3, and does not shard parameters with zero=0 to 2",
        instead="parallelism.reshard_after_forward=auto, with parallelism.zero=3 if parameters should be resharded",
    ),
    Conflict(
        when=lambda r, p, d: isinstance(p, MegatronFSDP) and p.zero >= 2 and p.accumulate == "hold",
        where="parallelism.accumulate",
        reason="with zero=2 and 3, megatron_fsdp shards gradients and therefore reduces them in every micro batch",
        instead="parallelism.accumulate=reduce, or parallelism.zero=1",
    ),
    Conflict(
        when=lambda r, p, d: isinstance(p, MegatronFSDP) and p.zero < 2 and p.double_buffer != "none",
        where="parallelism.double_buffer",
        reason="double buffers hold gathered parameters and unreduced gradients, but zero=0 and 1 shard neither",
        instead="parallelism.double_buffer=none, or parallelism.zero=2 or 3",
    ),
    Conflict(
        when=lambda r, p, d: isinstance(p, MegatronFSDP) and p.nccl_registration and p.double_buffer == "none",
        where="parallelism.nccl_registration",
        reason="NCCL can register only permanent memory, but without double buffers each unit's memory is freed after use",
        instead="parallelism.double_buffer=max_pool or fixed, or parallelism.nccl_registration=false",
    ),
    Conflict(
        when=lambda r, p, d: isinstance(p, MegatronFSDP) and (r.checkpoint.saves or loads_checkpoint(r)),
        where="checkpoint",
        reason="megatron_fsdp shards buckets of several parameters, but checkpoints need each parameter evenly sharded",
        instead="checkpoint=none and no run in model.weights, or parallelism=fsdp2",
    ),
    Conflict(
        when=lambda r, p, d: r.deterministic and r.compile.autotunes,
        where="compile.mode",
        reason="autotuning picks the kernel that happens to be fastest, and kernels differ in rounding",
        instead="compile.mode=default, or deterministic=false",
    ),
    Conflict(
        when=lambda r, p, d: (
            r.deterministic and r.model.resolved().get("mamba.kernel") == "fused" and only_atomic_sums()
        ),
        where="model.mamba.kernel",
        reason="old versions of mamba_ssm, without the module utils/determinism.py, add up gradients in random order",
        instead="model.mamba.kernel=torch, a newer mamba_ssm, or deterministic=false",
    ),
]

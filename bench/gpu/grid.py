"""The grid: short runs that test whether options work together. A row of the grid is a string with the overrides of one run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from bench.gpu.machine import Machine

Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""
AXES = {
    "parallelism": ("fsdp2", "fsdp1", "ddp", "single"),
    "precision": ("bf16", "fp32", "float8"),
    "compile": ("per_block", "eager", "whole_model"),
    "activation_checkpoint": ("none", "full", "selective_op", "selective_layer", "memory_budget"),
    "loss": ("plain", "chunked"),
}
"""Options to combine, keyed by config group. The rows below cover each compatible pair; `--product` tests all combinations."""

REFERENCE = "parallelism=single precision=fp32 compile=eager activation_checkpoint=none loss=plain"
"""Row whose losses and gradient norms every other row of the default model must match within TOLERANCE."""
EXPERT_REFERENCE = "model=moe_tiny parallelism=single precision=fp32"
HYBRID_REFERENCE = "model=hybrid_tiny parallelism=single precision=fp32 model.mamba.kernel=torch"
MTP_REFERENCE = f"{HYBRID_REFERENCE} model.mtp.depth=2"
MUON_REFERENCE = "optimizer=muon parallelism=single precision=fp32"
REFERENCES = {
    "optimizer=muon": MUON_REFERENCE,
    "model.mtp.depth=2": MTP_REFERENCE,
    "model=hybrid_tiny": HYBRID_REFERENCE,
    "model=moe_tiny": EXPERT_REFERENCE,
}
"""Reference rows, keyed by override. The first key that a row contains applies. The reference of any other row is REFERENCE."""

FIRST = [
    "parallelism=fsdp2 precision=bf16 compile=per_block activation_checkpoint=none loss=plain",
    "parallelism=fsdp2 precision=float8 compile=per_block activation_checkpoint=selective_op loss=chunked",
    "parallelism=fsdp1 precision=bf16 compile=eager activation_checkpoint=full loss=chunked",
    "parallelism=ddp precision=bf16 compile=eager activation_checkpoint=none loss=chunked",
    "parallelism=single precision=bf16 compile=whole_model activation_checkpoint=selective_op loss=chunked",
    "parallelism=fsdp2 precision=fp32 compile=whole_model activation_checkpoint=memory_budget loss=chunked",
    "parallelism=fsdp2 parallelism.cpu_offload=true precision=bf16",
    "precision=bf16 profiler=trace",
    "precision=bf16 profiler=memory",
    *(
        f"compile.cuda_graph=true measure_after=3 precision=bf16 {options}"
        for options in (
            "parallelism=single",
            "parallelism=fsdp2 compile=per_block",
            "parallelism=fsdp2 activation_checkpoint=full loss=chunked",
        )
    ),
]
"""The most informative rows. They run before any speed is measured."""

SEVERAL = {
    "parallelism=tp precision=bf16 compile=per_block": 2,
    "parallelism=tp precision=fp32 parallelism.loss_parallel=false": 2,
    "parallelism=fsdp2_tp precision=bf16 compile=per_block activation_checkpoint=selective_op": 4,
    "parallelism=fsdp1_tp precision=fp32 micro_batch=2": 4,
    "parallelism=hsdp2 precision=bf16 compile=per_block": 4,
    "parallelism=hsdp1 precision=bf16 compile=per_block": 4,
    "parallelism=megatron_fsdp precision=bf16": 2,
    "parallelism=megatron_fsdp precision=fp32 activation_checkpoint=full": 2,
    "parallelism=megatron_fsdp precision=bf16 parallelism.double_buffer=max_pool": 2,
    "parallelism=fsdp2 precision=fp32": 4,
    "parallelism=fsdp2 precision=bf16 parallelism.buffers=max_pool parallelism.prefetch=2": 2,
    "parallelism=fsdp2 precision=fp32 parallelism.buffers=scheduled activation_checkpoint=full": 2,
    "parallelism=fsdp2 precision=bf16 parallelism.buffers=process_group": 2,
    "parallelism=fsdp2 precision=bf16 parallelism.buffers=symmetric": 2,
    "model=moe_tiny parallelism=ep precision=fp32": 2,
    "model=moe_tiny parallelism=ep precision=bf16 compile=per_block activation_checkpoint=selective_op": 2,
}
"""Rows that need several devices, mapped to the number of devices."""

REST = [
    "parallelism=fsdp1 precision=bf16 compile=per_block activation_checkpoint=selective_layer loss=plain",
    "parallelism=fsdp2 precision=float8 compile=eager activation_checkpoint=selective_layer loss=plain",
    "parallelism=ddp precision=fp32 compile=per_block activation_checkpoint=selective_op loss=plain",
    "parallelism=single precision=bf16 compile=per_block activation_checkpoint=memory_budget loss=plain",
    "parallelism=fsdp1 precision=fp32 compile=eager activation_checkpoint=selective_op loss=plain",
    "parallelism=fsdp2 precision=float8 compile=whole_model activation_checkpoint=full loss=plain",
    "parallelism=fsdp1 precision=float8 compile=whole_model activation_checkpoint=memory_budget loss=plain",
    "parallelism=ddp precision=fp32 compile=whole_model activation_checkpoint=selective_layer loss=chunked",
    "parallelism=ddp precision=fp32 compile=per_block activation_checkpoint=full loss=plain",
    "parallelism=fsdp1 precision=float8 compile=whole_model activation_checkpoint=none loss=chunked",
    "parallelism=single precision=fp32 compile=whole_model activation_checkpoint=selective_layer loss=plain",
    "parallelism=ddp precision=fp32 compile=whole_model activation_checkpoint=memory_budget loss=plain",
    "parallelism=single precision=bf16 compile=eager activation_checkpoint=full loss=plain",
    # one option each
    "precision=fp32 precision.matmul=high",
    "precision=bf16 precision.reduce=bf16",
    "precision=float8 precision.all_gather=true compile=per_block",
    "precision=float8 precision.scaling=rowwise compile=per_block",
    "precision=float8 precision.scaling=rowwise_with_gw_hp compile=per_block activation_checkpoint=full",
    "precision=bf16 compile=per_block compile.allow_buffer_reuse=false",
    "precision=fp32 optimizer.implementation=foreach",
    "precision=bf16 optimizer=muon",
    "precision=fp32 optimizer.skip_above=5",
    "precision=fp32 wrap=root_only",
    "precision=fp32 wrap=size wrap.min_parameters=10000",
    "precision=fp32 parallelism.reshard_after_forward=never",
    "precision=fp32 parallelism.prefetch=2",
    "precision=bf16 parallelism.buffers=max_pool",
    "precision=fp32 parallelism.buffers=scheduled compile=per_block activation_checkpoint=full",
    "precision=fp32 parallelism=fsdp1 parallelism.forward_prefetch=true parallelism.limit_all_gathers=false",
    "precision=fp32 log_every=3",
    "precision=auto log_every=auto",
    "precision=bf16 deterministic=true compile=per_block",
    "precision=bf16 launch.bind=none",
    "precision=fp32 parallelism.accumulate=hold",
    "precision=fp32 parallelism=fsdp1 parallelism.accumulate=hold",
    "precision=bf16 wrap=rules compile=per_block",
    "precision=bf16 profiler=trace compile=per_block",
    "parallelism=fsdp2 parallelism.cpu_offload=true precision=fp32 parallelism.accumulate=hold",
    "parallelism=ddp precision=bf16 compile=per_block activation_checkpoint=selective_op",
    "parallelism=ddp precision=bf16",
    "parallelism=single precision=bf16",
    "parallelism=megatron_fsdp precision=bf16 launch.workers=1",
    "parallelism=megatron_fsdp precision=fp32 launch.workers=1 activation_checkpoint=full",
]
"""Rows that run after the first measurements of speed."""
HYBRIDS = [
    *(
        f"model=hybrid_tiny model.mamba.kernel=torch precision={precision} compile={compile}"
        for precision in ("bf16", "fp32")
        for compile in ("eager", "per_block")
    ),
    "model=hybrid_tiny model.mamba.kernel=torch precision=bf16 deterministic=true",
    "model=hybrid_tiny model.mamba.kernel=torch precision=fp32 deterministic=true compile=per_block",
    "model=hybrid_tiny model.mamba.kernel=torch model.mtp.depth=2 precision=fp32",
    "model=hybrid_tiny model.mamba.kernel=torch model.mtp.depth=2 precision=bf16 compile=per_block",
    "model=hybrid_tiny model.mamba.kernel=fused precision=fp32",
    "model=hybrid_tiny model.mamba.kernel=fused precision=bf16",
    "model=hybrid_tiny model.mamba.kernel=fused precision=bf16 compile=per_block",
    "model=hybrid_tiny model.mamba.kernel=fused precision=bf16 deterministic=true",
]
"""Rows whose model has Mamba-2 blocks."""
EXPERTS = [
    "model=moe_tiny precision=bf16 compile=per_block",
    "model=moe_tiny precision=fp32",
    "model=moe_tiny precision=fp32 compile=per_block",
    "model=moe_tiny parallelism=fsdp1 precision=bf16 activation_checkpoint=full",
    "model=moe_tiny parallelism=ddp precision=bf16",
    "model=moe_tiny precision=bf16 compile=per_block activation_checkpoint=selective_op",
]
"""Rows whose model has experts."""
REFUSED = [
    "parallelism=ddp precision=float8",
    "precision=fp32 compile=eager activation_checkpoint=memory_budget",
    "precision=bf16 compile=per_block compile.mode=reduce-overhead",
    "parallelism=single precision=bf16 compile=per_block compile.mode=reduce-overhead",
]
"""Rows that meshrunner refuses to run, because their options cannot be combined."""


def all_combinations() -> Iterator[str]:
    """Yield one row per combination of the options in AXES, except REFERENCE and the rows in FIRST, REST and REFUSED."""
    for options in product(*AXES.values()):
        row = " ".join(f"{group}={option}" for group, option in zip(AXES, options, strict=True))
        if row not in (REFERENCE, *FIRST, *REST, *REFUSED):
            yield row


LEAVES = {"profiler=trace": "trace/rank0.json.gz", "profiler=memory": "trace/memory_rank0*"}
"""Glob patterns, keyed by option. A run with the option must write a file that matches the pattern to its run directory."""
TOLERANCE = {
    "fp32": (1e-4, 1e-3),
    "tf32": (1e-2, 5e-2),
    "bf16": (1e-2, 5e-2),
    "auto": (1e-2, 5e-2),
    "float8": (5e-2, 2e-1),
}
"""Largest allowed relative differences (loss, gradient norm) between a step and that step of the reference, keyed by dtype."""


def reference_of(row: str) -> str:
    """Return the reference row with which a row is compared."""
    return next((reference for word, reference in REFERENCES.items() if word in row.split()), REFERENCE)


def missing(row: str, machine: Machine, devices: int) -> str:
    """Return why a machine cannot run a row on `devices` ranks, or "" if it can."""
    words = {*row.split()}
    packages = {"precision=float8": "torchao"}
    packages |= {"model.mamba.kernel=fused": "mamba-ssm", "parallelism=megatron_fsdp": "megatron-fsdp"}
    on_gpu = ("fused", "megatron_fsdp", "process_group", "symmetric")
    if devices > machine.devices:
        return f"this row needs {devices} GPUs"
    if not machine.gpus and (found := [word for word in words if word.partition("=")[2] in on_gpu]):
        return f"{found[0]} needs a GPU"
    if not machine.gpus and "compile.cuda_graph=true" in words:
        return "a CUDA graph needs a GPU"
    if package := next((name for word, name in packages.items() if word in words and not machine.version(name)), ""):
        return f"the package {package} is not installed"
    if words & {"parallelism=ep", "parallelism.buffers=symmetric"} and machine.torch < (2, 12):
        return "this row needs torch 2.12 or later"
    if devices == 1 and words & {"parallelism.buffers=max_pool", "parallelism.buffers=scheduled"}:
        return "this row needs 2 GPUs: with one shard, FSDP2 gathers nothing into a pool"
    return ""


def dtype_of(row: str) -> str:
    """Return the dtype that a row computes in, as a key of TOLERANCE. Every row sets `precision`."""
    words = dict(word.split("=", 1) for word in row.split())
    if words.get("precision.matmul") == "high":
        return "tf32"
    return words["precision"]


def differs(row: str, steps: Steps, reference: Steps) -> str:
    """Return how a row's steps differ from the reference (in number, or in value beyond TOLERANCE), or "" if they match."""
    if len(steps) != len(reference):
        return f"it has {len(steps)} steps, but the reference has {len(reference)}"
    for step, values in enumerate(zip(steps, reference, strict=True), 1):
        for what, most, value, expected in zip(("loss", "norm"), TOLERANCE[dtype_of(row)], *values, strict=True):
            if not abs(value - expected) <= most * abs(expected):
                return f"the {what} of step {step} is {value:.5f}, in the reference {expected:.5f}"
    return ""

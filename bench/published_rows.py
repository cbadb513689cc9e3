"""Published training runs, and the overrides with which `bench.published` predicts them."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A published run, and the overrides that describe it."""

    source: str
    """Key in SOURCES."""
    name: str
    overrides: tuple[str, ...]
    wps: tuple[float, float]
    """Published range of tokens per second per device."""
    reserved_gib: float | None = None
    """Published peak of reserved memory, in GiB; None if not published."""
    active_gib: float | None = None
    """Published peak of active memory, in GiB; None if not published."""
    fitted: bool = False
    """Whether constants of the device were fitted to this row."""
    other_program: bool = False
    """Whether the run differed from the predicted run, so that the difference in speed is not an error of the prediction."""


SOURCES = {
    "PR 165": (
        "[torchtitan, pull request #165](https://github.com/pytorch/torchtitan/pull/165), March 2024. The runs used H100s "
        "with a power limit of 500 W, and allocator segments of fixed size"
    ),
    "titan 2024-07": "[torchtitan](https://github.com/pytorch/torchtitan), the docs/performance.md of July 2024",
    "titan 2024-12": (
        "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md), "
        "December 2024. The runs used H100s with a power limit of 500 W. torchtitan's launch script set expandable segments. "
        "Float8 runs with tensor parallelism gathered activations in float8. Other float8 runs gathered weights in float8. "
        "The runs with pipelines overlapped the gathers of activations with matmuls"
    ),
    "Trainy": (
        "[Trainy](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md) with "
        "torchtitan, June 2025. Runs did not use torchtitan's launch script, so segments have a fixed size. The loss was compiled"
    ),
    "AWS": (
        "[AWS](https://aws.amazon.com/blogs/machine-learning/efficient-pre-training-of-llama-3-like-model-architectures-using-torchtitan-"
        "on-amazon-sagemaker/) with torchtitan, October 2024. No batch size was published, so torchtitan's default of 1 is used"
    ),
    "H200": "[our runs on one H200](gpu.md), November 2026. All runs used torch 2.11, cuDNN's attention and expandable segments",
    "fms-fsdp": "[fms-fsdp](https://github.com/foundation-model-stack/fms-fsdp). The network had 400 Gbit/s per node",
    "IBM 2024-03": (
        "[IBM](https://pytorch.org/blog/maximizing-training/) with fms-fsdp. The network had 400 Gbit/s per node of A100s "
        "and 800 Gbit/s per node of H100s"
    ),
    "IBM 2024-05": (
        "[IBM](https://pytorch.org/blog/maximizing-training-throughput/) with fms-fsdp. Speeds were published as MFU in whole "
        "percent. The network had 400 Gbit/s per node of A100s and 3.2 Tbit/s per node of H100s"
    ),
    "Kempner": (
        "[KempnerForge](https://github.com/KempnerInstitute/KempnerForge/tree/main/benchmarks/mfu_scaling), April 2026. The "
        "nodes had four H200s. Runs were compiled, with full recomputation. The published memory is too small for fp32 weights, "
        "so weights were in bf16"
    ),
}
"""Descriptions of the publications. Each begins with a link."""

COMPILED = "compile=per_block"
FLOAT8 = (COMPILED, "precision=float8")
GATHERED = (*FLOAT8, "precision.all_gather=true")
FLASH = "launch.env.TORCH_CUDNN_SDPA_DEPRIORITIZED=1"
"""Override for FlashAttention, as in torch before 2.11."""
THEN = ("wrap=rules", "data=random", FLASH, "model.kind=tests.titan2024:Titan2024", "loss.kind=tests.titan2024:Logits")
LAYOUTS = {
    "fsdp1": (
        "parallelism=fsdp1",
        "parallelism.reshard_after_forward=always",
        "parallelism.kind=tests.titan2024:FSDP1Then",
    ),
    "fsdp2": (
        *("parallelism=fsdp2", "parallelism.reshard_after_forward=except_last"),
        "parallelism.kind=tests.titan2024:FSDP2Then",
    ),
}
Speed = float | tuple[float, float]


def march(
    layout: str,
    recompute: str,
    wps: Speed,
    reserved: float,
    active: float | None = None,
    *more: str,
    fitted: bool = True,
) -> Row:
    """Return a run of pull request #165, in which a compiled block included its recomputation."""
    inside = COMPILED in more and recompute == "full"
    overrides = (
        *("model=llama2_7b", "hardware=h100_96gb", "seq_len=2048", "micro_batch=8", "precision=bf16", *THEN),
        *(*LAYOUTS[layout], f"activation_checkpoint={recompute}", *more),
        *(("activation_checkpoint.kind=tests.titan2024:FullInside",) if inside else ()),
    )
    name = ", ".join(("Llama 2 7B", layout, recompute, *_changes(more)))
    return Row("PR 165", name, overrides, _range(wps), reserved, active, fitted)


def titan(
    source: str,
    where: tuple[str, int],
    model: str,
    recompute: str,
    size: tuple[int, int],
    wps: Speed,
    reserved: float | None = None,
    *more: str,
) -> Row:
    """Return a later run of torchtitan, with FSDP2. `where`: (hardware, nodes); `size`: (tokens, sequences per device)."""
    (hardware, nodes), (seq_len, batch) = where, size
    overrides = (
        *(f"model={model}", f"hardware={hardware}", f"launch.nodes={nodes}", f"seq_len={seq_len}"),
        *(f"micro_batch={batch}", f"activation_checkpoint={recompute}", "precision=bf16", *THEN, *LAYOUTS["fsdp2"]),
        *("parallelism.kind=tests.titan2024:FSDP2InDecember", *more),
    )
    name = ", ".join((_title(model), recompute, *_changes(more)))
    return Row(source, name, overrides, _range(wps), reserved, fitted=source == "titan 2024-07")


def pipelined(schedule: str, wps: float, reserved: float) -> Row:
    """Return a run of December 2024 with a pipeline, in which float8 gathers of tensor parallelism overlapped with matmuls."""
    more = *WITH_PIPELINE, f"parallelism.pipeline_schedule={schedule}", "compile.async_tensor_parallel=true"
    row = titan("titan 2024-12", (H100, 64), "llama3_405b", "full", (8192, 4), wps, reserved, *more)
    return row._replace(name=f"{row.name}, pipeline 8, {schedule}", other_program=True)


def a100(model: str, batch: int, recompute: str, wps: float) -> Row:
    """Return a run of July 2024, whose RMSNorm was a fused kernel."""
    size = (8192 if model.startswith("llama3") else 4096, batch)
    norm = "model.kind=tests.titan2024:FusedNorm"
    return titan("titan 2024-07", ("a100_80gb", 8), model, recompute, size, wps, None, norm)


def fms(
    source: str, where: tuple[str, int, float], model: str, batch: int, recompute: str, wps: Speed, *more: str
) -> Row:
    """Return a run of fms-fsdp with FSDP1; HSDP for models up to 13B. `where`: (hardware, nodes, network GB/s per device)."""
    hardware, nodes, network = where
    layout = ("parallelism=fsdp1",) if "70b" in model else ("parallelism=hsdp1", f"parallelism.replicate={nodes}")
    overrides = (
        *(f"model={model}", f"hardware={hardware}", f"launch.nodes={nodes}", f"hardware.network_bandwidth={network}"),
        *("seq_len=4096", f"micro_batch={batch}", f"activation_checkpoint={recompute}", "precision=bf16"),
        *("precision.reduce=bf16", "data=random", FLASH, *layout, *more),
    )
    return Row(source, ", ".join((_title(model), recompute, f"batch {batch}", *_changes(more))), overrides, _range(wps))


def kempner(model: str, nodes: int, workers: int, tensor: int, wps: float) -> Row:
    """Return a run of KempnerForge on nodes of H200s."""
    batch, micro_batches = (2, 4) if model == "llama3_70b" else (4, 2)
    world = nodes * workers
    overrides = (
        *(f"model={model}", "hardware=h200", f"launch.nodes={nodes}", f"launch.workers={workers}", "seq_len=4096"),
        *(f"micro_batch={batch}", f"global_batch={batch * micro_batches * world // tensor}", "precision=bf16"),
        *("activation_checkpoint=full", COMPILED, "data=random", f"parallelism={'single' if world == 1 else 'fsdp2'}"),
        *((f"parallelism.tensor={tensor}",) if tensor > 1 else ()),
    )
    name = ", ".join((_title(model), *[f"tensor {tensor}"] * (tensor > 1)))
    return Row("Kempner", name, overrides, _range(wps), other_program=True)


def h200(model: str, recompute: str, batch: int, wps: float, reserved_gib: float, active_gib: float, *more: str) -> Row:
    """Return one of our own runs on an H200. `model` must be a key of the dict `part` below."""
    part = {
        "Llama 3.2 1B": ("model=llama3_1b",),
        "8 blocks of Llama 3.1 8B": ("model=llama3_8b", "model.n_layers=8"),
        "2 blocks of Mixtral 8x7B": ("model=mixtral_8x7b", "model.n_layers=2"),
    }
    overrides = (
        *(*part[model], "hardware=h200", "launch.workers=1", "seq_len=4096", f"micro_batch={batch}", "precision=bf16"),
        *(f"activation_checkpoint={recompute}", "data=random", *more),
    )
    name = ", ".join((model, f"batch {batch}", recompute, *_changes(more)))
    return Row("H200", name, overrides, _range(wps), reserved_gib, active_gib)


def mfu(percent: int, model: str, hardware: str) -> Speed:
    """Return the range of tokens per second whose MFU rounds to `percent`. FLOPs per token: nanoGPT's formula, 4,096 tokens."""
    flops = {"llama2_7b": 46.87e9, "llama2_13b": 88.4e9, "llama2_70b": 446.1e9}[model]
    peak = {"a100_80gb": 312e12, "h100_80gb": 989e12}[hardware]
    return (percent - 0.5) / 100 * peak / flops, (percent + 0.5) / 100 * peak / flops


def ibm(percents: dict[str, int], hardware: str, nodes: int, network: float) -> list[Row]:
    """Return the compiled runs of May 2024, one for each model."""
    where, recompute = (
        (hardware, nodes, network),
        {"llama2_7b": "none", "llama2_13b": "selective_layer", "llama2_70b": "full"},
    )
    return [
        fms("IBM 2024-05", where, model, 2, recompute[model], mfu(percent, model, hardware), COMPILED)
        for model, percent in percents.items()
    ]


def _range(wps: Speed) -> tuple[float, float]:
    return wps if isinstance(wps, tuple) else (wps, wps)


def _title(model: str) -> str:
    family, size = model.split("_")
    return f"Llama {family.removeprefix('llama')} {size.upper()}"


def _changes(overrides: tuple[str, ...]) -> list[str]:
    """Return short descriptions of overrides."""
    known = {
        COMPILED: "compiled",
        "precision=float8": "float8",
        "precision.all_gather=true": "float8 gathers",
        "parallelism.tensor=8": "tensor 8",
        "micro_batch=16": "batch 16",
        SINGLE: "single",
        GRAPH: "CUDA graph",
        FLASH: "FlashAttention",
    }
    return [known[each] for each in overrides if each in known]


H100, H200, SAC = "h100_96gb", "h200", "selective_op"
FSDP2, SINGLE, GRAPH = "parallelism=fsdp2", "parallelism=single", "compile.cuda_graph=true"
COMPILED_LOSS = ("parallelism.kind=fsdp2", "loss.kind=plain")
"""Overrides for torchtitan runs that compile the loss. A compiled loss keeps no logits in fp32."""
WITH_TENSOR = (*FLOAT8, *COMPILED_LOSS, "parallelism.tensor=8")
WITH_PIPELINE = (*WITH_TENSOR, "parallelism.pipeline=8", "parallelism.reshard_after_forward=never", "global_batch=256")
"""Overrides for pipelines with torchtitan's default number of micro batches, which is the number of pipeline ranks, 8."""

ROWS = (
    march("fsdp1", "full", (6100, 6200), 32.14, 23.58),
    march("fsdp1", SAC, (6500, 6700), 63.90, 50.35),
    march("fsdp2", "full", (6100, 6300), 31.02, 22.73),
    march("fsdp2", SAC, (6600, 6800), 59.41, 49.54),
    march("fsdp2", "full", (7200, 7500), 28.90, None, COMPILED),
    march("fsdp2", SAC, (8100, 8400), 53.83, None, COMPILED),
    march("fsdp2", "none", (9100, 9300), 90.28, None, COMPILED, fitted=False),
    march("fsdp2", SAC, 8600, 88.23, None, COMPILED, "micro_batch=16", fitted=False),
    titan("titan 2024-12", (H100, 1), "llama3_8b", SAC, (8192, 2), 5762, 82.4),
    titan("titan 2024-12", (H100, 1), "llama3_8b", SAC, (8192, 2), 6667, 77.0, COMPILED),
    titan("titan 2024-12", (H100, 1), "llama3_8b", SAC, (8192, 2), 8532, 76.8, *GATHERED),
    titan("titan 2024-12", (H100, 16), "llama3_8b", SAC, (8192, 2), 5605, 67.0),
    titan("titan 2024-12", (H100, 16), "llama3_8b", SAC, (8192, 2), 6514, 62.0, COMPILED),
    titan("titan 2024-12", (H100, 16), "llama3_8b", SAC, (8192, 2), 8380, 61.8, *GATHERED),
    titan("titan 2024-12", (H100, 1), "llama3_8b", "full", (32768, 1), 3890, 83.9, *GATHERED),
    titan("titan 2024-12", (H100, 32), "llama3_70b", "full", (8192, 16), 829, 71.9, *WITH_TENSOR),
    pipelined("1f1b", 100, 82.5),
    pipelined("interleaved_1f1b", 128, 72.7),
    titan("Trainy", (H200, 4), "llama3_8b", SAC, (8192, 2), 10938, 47.96, *GATHERED, *COMPILED_LOSS),
    titan("Trainy", (H200, 8), "llama3_8b", SAC, (8192, 2), 10753, 46.97, *GATHERED, *COMPILED_LOSS),
    h200("Llama 3.2 1B", "none", 4, 60594, 47.305, 42.680, FSDP2, COMPILED),
    h200("Llama 3.2 1B", "none", 2, 55093, 34.098, 29.437, FSDP2, COMPILED),
    h200("Llama 3.2 1B", "none", 8, 63257, 73.791, 69.167, FSDP2, COMPILED),
    h200("Llama 3.2 1B", "none", 4, 60885, 47.346, 42.680, FSDP2, COMPILED, GRAPH),
    h200("Llama 3.2 1B", "none", 4, 60375, 47.305, 42.680, FSDP2, COMPILED, FLASH),
    h200("Llama 3.2 1B", "none", 4, 51419, 70.943, 62.321, FSDP2),
    h200("Llama 3.2 1B", "none", 4, 51467, 70.963, 62.321, FSDP2, GRAPH),
    h200("Llama 3.2 1B", "none", 4, 61687, 42.715, 42.680, SINGLE, COMPILED),
    h200("Llama 3.2 1B", "none", 8, 63831, 69.223, 69.167, SINGLE, COMPILED),
    h200("8 blocks of Llama 3.1 8B", SAC, 2, 31253, 55.402, 44.116, FSDP2, COMPILED),
    h200("8 blocks of Llama 3.1 8B", "full", 2, 27725, 53.580, 43.681, FSDP2, COMPILED),
    h200("2 blocks of Mixtral 8x7B", "none", 1, 41290, 64.107, 52.731, FSDP2, COMPILED),
    h200("2 blocks of Mixtral 8x7B", "none", 1, 39414, 63.502, 52.950, FSDP2),
    titan("AWS", ("h100_80gb", 4), "llama3_8b", SAC, (8192, 1), 6475),
    titan("AWS", ("h100_80gb", 4), "llama3_8b", SAC, (8192, 1), 7166, None, COMPILED),
    titan("AWS", ("h100_80gb", 4), "llama3_8b", SAC, (8192, 1), 8624, None, *FLOAT8),
    titan("AWS", ("h100_80gb", 4), "llama3_8b", SAC, (8192, 1), 8950, None, *GATHERED),
    a100("llama3_8b", 1, "selective_layer", 2904),
    a100("llama3_8b", 1, SAC, 2973),
    a100("llama3_70b", 1, "full", 331),
    a100("llama2_13b", 2, "none", 2162),
    a100("llama2_13b", 2, "selective_layer", 1914),
    a100("llama2_13b", 2, SAC, 1904),
    a100("llama2_70b", 1, SAC, 355),
    a100("llama2_70b", 2, "full", 353),
    fms("fms-fsdp", ("a100_80gb", 16, 6.25), "llama2_7b", 2, "none", 3760),
    fms("fms-fsdp", ("a100_80gb", 16, 6.25), "llama2_13b", 1, "none", 1700),
    fms("fms-fsdp", ("a100_80gb", 16, 6.25), "llama2_70b", 6, "full", 380),
    fms("IBM 2024-03", ("a100_80gb", 16, 6.25), "llama2_13b", 2, "selective_layer", 1800),
    fms("IBM 2024-03", ("a100_80gb", 16, 6.25), "llama2_70b", 2, "full", 370),
    *ibm({"llama2_7b": 68, "llama2_13b": 60, "llama2_70b": 55}, "a100_80gb", 16, 6.25),
    fms("IBM 2024-03", ("h100_80gb", 12, 12.5), "llama2_7b", 2, "none", 7500),
    fms("IBM 2024-03", ("h100_80gb", 12, 12.5), "llama2_13b", 2, "selective_layer", 3800),
    fms("IBM 2024-03", ("h100_80gb", 12, 12.5), "llama2_70b", 2, "full", 800),
    *ibm({"llama2_7b": 45, "llama2_13b": 43, "llama2_70b": 38}, "h100_80gb", 58, 50.0),
    kempner("llama3_8b", 1, 1, 1, 10471),
    kempner("llama3_8b", 1, 2, 1, 9364),
    kempner("llama3_8b", 1, 2, 2, 6582),
    kempner("llama3_8b", 1, 4, 1, 9746),
    kempner("llama3_8b", 1, 4, 4, 6284),
    kempner("llama3_8b", 1, 4, 2, 6495),
    kempner("llama3_8b", 2, 4, 4, 5537),
    kempner("llama3_8b", 8, 4, 4, 4872),
    kempner("llama3_70b", 8, 4, 4, 552),
)

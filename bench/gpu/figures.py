"""Configurations of realistic models whose speed, peak memory and start-up time are measured."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from bench.gpu.commands import overridden
from bench.gpu.loops.shape import Shape
from bench.gpu.machine import Machine
from bench.gpu.results import Result

WINDOWS = 3
"""Number of intervals per run in which speed is measured. Metrics are read at the end of each interval."""
READ_EVERY = 5
"""Number of steps per interval. A run has WINDOWS + 1 intervals, because the first one is not measured."""
STEPS = READ_EVERY * (1 + WINDOWS)
LLAMA_3 = {"vocab_size": 128256, "n_heads": 32, "n_kv_heads": 8}


class Subject(NamedTuple):
    """A model to measure, with its sequence length and its micro batch on one device."""

    title: str
    shape: Shape | None
    """Dimensions of the model in the hand-written loop; None if the loop has no such model."""
    overrides: str
    """Command-line overrides that give meshrunner's model the dimensions in `shape`."""
    seq_len: int
    micro_batch: int
    lr: float = 3e-4
    flavor: str = ""
    """torchtitan's name of the model, or ""."""


class Case(NamedTuple):
    """A configuration to measure with meshrunner."""

    subject: str
    recompute: str
    compile: str
    layout: str = "parallelism=fsdp2"
    devices: int = 1
    more: str = ""
    """Further overrides."""

    @property
    def what(self) -> str:
        """Text that identifies the case: its settings, and its number of devices if it uses several."""
        layout = self.layout + (f" on {self.devices}" if self.devices > 1 else "")
        return f"{self._work} {layout} {self.more}".strip()

    @property
    def loop(self) -> str:
        """Text that identifies the same work in the hand-written loop; "" if the loop does not measure this case."""
        return self._work if self.devices == 1 and not self.more and self.subject in ("1B", "8B") else ""

    @property
    def _work(self) -> str:
        return f"{self.subject} compile={self.compile} activation_checkpoint={self.recompute}"


FSDP2, SINGLE = "parallelism=fsdp2", "parallelism=single"
FIRST = [
    Case("1B", "none", "per_block"),
    Case("1B", "none", "per_block", SINGLE),
    Case("8B", "selective_op", "per_block"),
]
"""Cases to measure three times. The first measurement precedes all other cases."""
BATCHES = [
    Case("1B", "none", "per_block", layout, more=f"micro_batch={size}") for size in (8, 2) for layout in (FSDP2, SINGLE)
]
SETTINGS = [
    *(Case("1B", "none", compile, more="compile.cuda_graph=true") for compile in ("per_block", "eager")),
    Case("1B", "none", "per_block", more="+launch.env.TORCH_CUDNN_SDPA_DEPRIORITIZED=1"),
    Case("1B", "none", "per_block", more="profiler=trace profiler.start=2 profiler.steps=3"),
    Case("1B", "none", "per_block", more="checkpoint=dcp_async checkpoint.every=10 checkpoint.keep=1"),
]
"""Cases with a setting of interest: CUDA graphs, attention without cuDNN, a trace, asynchronous checkpoints."""
MODELS = [
    *(Case("mixtral", recompute, compile) for recompute in ("none", "full") for compile in ("per_block", "eager")),
    *(
        Case("nemotron", "none", compile, more=f"model.mamba.kernel={kernel}")
        for kernel in ("torch", "fused")
        for compile in ("per_block", "eager")
    ),
]
"""Models with experts and with Mamba-2 blocks."""
REST = [
    Case("1B", "selective_op", "per_block"),
    Case("8B", "none", "per_block"),
    Case("8B", "full", "per_block"),
    Case("1B", "full", "per_block"),
    Case("1B", "none", "eager"),
    Case("1B", "none", "eager", SINGLE),
    Case("8B", "selective_op", "per_block", SINGLE),
    Case("8B", "selective_op", "eager"),
    Case("1B", "selective_op", "eager"),
    Case("8B", "none", "eager"),
    Case("1B", "full", "eager"),
    Case("8B", "full", "eager"),
]
SEVERAL = [
    Case("8B", "selective_op", "per_block", "parallelism=fsdp2", 2),
    Case("8B", "selective_op", "per_block", "parallelism=tp", 2),
    Case("8B", "selective_op", "per_block", "parallelism=fsdp2_tp", 4),
    Case("8B", "selective_op", "per_block", "parallelism=fsdp2", 8),
    Case("8B", "selective_op", "per_block", "parallelism=fsdp2_tp", 8),
]


def subjects(machine: Machine) -> dict[str, Subject]:
    """Return the models, keyed by the names in `Case.subject`. They fit on one GPU of 80 to 141 GB. On a CPU, they are toys."""
    if not machine.gpus:
        toy = Shape(64, 64, 2, 4, 2, 128, tie_embeddings=True)
        model = "model.vocab_size=64 model.dim=64 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.ffn_dim=128"
        model += " model.rope_theta=500000.0"
        return {
            "1B": Subject("toy, tied", toy, f"{model} model.tie_embeddings=true", 64, 4, 1e-2),
            "8B": Subject("toy", toy._replace(tie_embeddings=False), model, 64, 4, 1e-2),
            "mixtral": Subject("toy, experts", None, "model=moe_tiny model.n_layers=2", 64, 4, 1e-2),
            "nemotron": Subject("toy, Mamba-2", None, "model=hybrid_tiny", 64, 4, 1e-2),
        }
    gib = machine.memory_gib or 0
    one = Shape(dim=2048, n_layers=16, ffn_dim=8192, tie_embeddings=True, **LLAMA_3)
    eight = Shape(dim=4096, n_layers=8, ffn_dim=14336, **LLAMA_3)
    return {
        "1B": Subject("Llama 3.2 1B", one, "model=llama3_1b", 4096, 4 if gib >= 75 else 2, flavor="1B"),
        "8B": Subject(
            *("8 of 32 blocks of Llama 3.1 8B", eight, "model=llama3_8b model.n_layers=8", 4096),
            micro_batch=2 if gib >= 100 else 1,
            flavor="8B",
        ),
        "mixtral": Subject("2 of 32 blocks of Mixtral 8x7B", None, "model=mixtral_8x7b model.n_layers=2", 4096, 1),
        "nemotron": Subject(
            "9 of 52 blocks of Nemotron-H 8B", None, "model=nemotron_h_8b model.pattern=M-M-M-M*-", 4096, 1
        ),
    }


def overrides(case: Case, subject: Subject, machine: Machine) -> list[str]:
    """Return the arguments of the `meshrunner run` that measures a case."""
    words = [
        *subject.overrides.split(),
        f"seq_len={subject.seq_len}",
        f"micro_batch={subject.micro_batch}",
        *case.layout.split(),
        f"launch.workers={case.devices}",
        "precision=bf16",
        f"activation_checkpoint={case.recompute}",
        f"compile={case.compile}",
        f"optimizer.lr={subject.lr}",
        "data=random",
        "tracker=none",
        "sweep.preflight=off",
        f"steps={STEPS}",
        f"measure_after={READ_EVERY}",
        f"log_every={READ_EVERY}",
        *case.more.split(),
    ]
    return overridden(words if machine.gpus else [*words, "hardware=cpu", "launch.threads=1"])


def ratios(ours: list[Result], theirs: list[Result]) -> list[float]:
    """Return one ratio of tokens per second, meshrunner / loop, for each pair of results in which both speeds are known."""
    pairs = zip(ours, theirs, strict=False)
    return [a.figures["wps"] / b.figures["wps"] for a, b in pairs if a.figures.get("wps") and b.figures.get("wps")]


def middle(results: list[Result], key: str) -> float | None:
    """Return the median of a measured value, such as `mfu`, over the results that contain it, or None if no result does."""
    known = [value for each in results if (value := each.figures.get(key)) is not None]
    return median(known) if known else None

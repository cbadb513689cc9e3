"""Train realistic Llamas, in turn with meshrunner and with a hand-written loop. Measure speed, peak memory and start-up time."""

from __future__ import annotations

import json
import os
import sys
from statistics import median
from typing import NamedTuple

from bench.gpu.commands import REPOSITORY, Commands, outcome, said, shown
from bench.gpu.machine import Machine
from bench.gpu.results import Result
from bench.gpu.shape import Shape
from meshrunner.runner.rundir import JsonFile

WINDOWS = 3
"""Number of intervals per run in which speed is measured. Metrics are read at the end of each interval."""
READ_EVERY = 5
"""Number of steps per interval. A run has WINDOWS + 1 intervals, because the first one is not measured."""
STEPS = READ_EVERY * (1 + WINDOWS)
LARGE_GIB = 100
"""GPUs with at least this much memory, in GiB, train with the larger of the two micro batches in `subjects`."""
LLAMA_3 = {"vocab_size": 128256, "n_heads": 32, "n_kv_heads": 8}


class Subject(NamedTuple):
    """A model to measure, with its sequence length and its micro batch on one device."""

    title: str
    shape: Shape
    overrides: str
    """Command-line overrides that give meshrunner's model the dimensions `shape`."""
    seq_len: int
    micro_batch: int
    lr: float = 3e-4


class Case(NamedTuple):
    """A configuration to measure with meshrunner, and also with the hand-written loop if it uses a single device."""

    subject: str
    recompute: str
    compile: str
    layout: str = "parallelism=fsdp2"
    devices: int = 1

    @property
    def what(self) -> str:
        """Text that identifies the case: its settings, and its number of devices if it uses several."""
        layout = self.layout + (f" on {self.devices}" if self.devices > 1 else "")
        return f"{self.subject} compile={self.compile} activation_checkpoint={self.recompute} {layout}"


FIRST = [
    Case("1B", "none", "per_block"),
    Case("8B", "selective_op", "per_block"),
]
"""Cases to measure first, before the rows SEVERAL and REST of `bench.gpu.grid` are tested."""
REST = [
    Case("1B", "selective_op", "per_block"),
    Case("8B", "none", "per_block"),
    Case("8B", "full", "per_block"),
    Case("1B", "full", "per_block"),
    Case("1B", "none", "eager"),
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
    """Return two models, keyed by the names in `Case.subject`. They fit one GPU of 80 to 141 GB. On a CPU, they are toys."""
    if not machine.gpus:
        toy = Shape(64, 64, 2, 4, 2, 128, tie_embeddings=True)
        model = "model.vocab_size=64 model.dim=64 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.ffn_dim=128"
        model += " model.rope_theta=500000.0"
        return {
            "1B": Subject("toy, tied", toy, f"{model} model.tie_embeddings=true", 64, 4, 1e-2),
            "8B": Subject("toy", toy._replace(tie_embeddings=False), model, 64, 4, 1e-2),
        }
    large = (machine.memory_gib or 0) >= LARGE_GIB
    one = Shape(dim=2048, n_layers=16, ffn_dim=8192, tie_embeddings=True, **LLAMA_3)
    eight = Shape(dim=4096, n_layers=8, ffn_dim=14336, **LLAMA_3)
    return {
        "1B": Subject("Llama 3.2 1B", one, "model=llama3_1b", 4096, 4 if large else 2),
        "8B": Subject(
            "8 of 32 blocks of Llama 3.1 8B", eight, "model=llama3_8b model.n_layers=8", 4096, 2 if large else 1
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
    ]
    return words if machine.gpus else [*words, "hardware=cpu", "launch.threads=1"]


def measured(case: Case, number: int, machine: Machine, commands: Commands) -> Result:
    """Train the model of a case with meshrunner. Return its speed, memory, start-up time and losses."""
    name = f"figures-{number:03}-meshrunner"
    run_dir = commands.folder / name
    arguments = overrides(case, subjects(machine)[case.subject], machine)
    ended = commands.meshrunner(name, "run", *arguments, f"hydra.run.dir={run_dir}")
    found = outcome(run_dir, ended, commands)
    summary, losses = found.summary, [loss for loss, _ in found.steps]
    figures = {
        "side": "meshrunner",
        "wps": summary.get("perf/wps_median"),
        "mfu": summary.get("perf/mfu_median"),
        "peak_active_gib": summary.get("memory/peak_active_gib"),
        "startup_active_gib": summary.get("memory/startup_peak_active_gib"),
        "first_step_s": found.first_step and found.first_step - ended.begin,
        "parameters": summary.get("model/params"),
        "flops_per_token": summary.get("model/flops_per_token"),
        "peak_tflops": summary.get("peak_tflops"),
        "losses": losses,
    }
    return Result("figures", case.what, found.state, found.reason, found.log, ended.seconds, figures)


def measured_plain(case: Case, number: int, machine: Machine, commands: Commands, peak_tflops: float | None) -> Result:
    """Train a case in the hand-written loop. Return speed, memory, start-up time and losses. MFU is relative to `peak_tflops`."""
    name, subject = f"figures-{number:03}-loop", subjects(machine)[case.subject]
    out = commands.folder / f"{name}.json"
    arguments = {
        "shape": json.dumps(subject.shape._asdict()),
        "recompute": case.recompute,
        "compile": case.compile,
        "seq-len": subject.seq_len,
        "micro-batch": subject.micro_batch,
        "steps": STEPS,
        "read-every": READ_EVERY,
        "lr": subject.lr,
        "out": out,
    }
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    words += [] if machine.gpus else ["--threads", "1", "--device", "cpu"]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(commands.folder / "cache" / "loop")}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))}
    ended = commands.run(name, sys.executable, "-m", "bench.gpu.plain_loop", *words, **caches, **path)
    found = JsonFile.read(out).as_json()
    if ended.code != 0 or "oom" in found:
        up = ended.code != 0 and commands.over
        reason = "stopped when the time was up" if up else found.get("oom") or said(ended.log)
        state = "not run" if up else "failed"
        return Result("figures", case.what, state, reason, shown(ended.log), ended.seconds, {"side": "loop"})
    found |= {"side": "loop", "first_step_s": found["first_step"] - ended.begin, "peak_tflops": peak_tflops}
    found["mfu"] = 100 * found["wps"] * found["flops_per_token"] / (1e12 * peak_tflops) if peak_tflops else None
    return Result("figures", case.what, "works", "", "", ended.seconds, found)


def ratios(ours: list[Result], theirs: list[Result]) -> list[float]:
    """Return one ratio of tokens per second, meshrunner / loop, for each pair of results in which both speeds are known."""
    pairs = zip(ours, theirs, strict=False)
    return [a.figures["wps"] / b.figures["wps"] for a, b in pairs if a.figures.get("wps") and b.figures.get("wps")]


def middle(results: list[Result], key: str) -> float | None:
    """Return the median of a measured value, such as `mfu`, over all results that contain it, or None if none does."""
    known = [value for each in results if (value := each.figures.get(key)) is not None]
    return median(known) if known else None

"""Peak FLOP/s, the denominator of MFU: from the data sheet of a GPU, measured on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from meshrunner.recipes.storage.cache_dir import cache_dir
from meshrunner.runner.config.devices import cpu_name
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.rundir.files import read_json, write_json

MATMUL_SIZE = 1024
MATMUL_REPEATS = 12


def peak_flops(
    experiment: Experiment, device: torch.device, context: WorkerContext
) -> tuple[float | None, dict[str, Any]]:
    """
    Return the peak FLOP/s of one device for the run's compute dtype, None if unknown, and the summary's keys about the device.

    This is a collective. On a CPU rank 0 measures the peak, unless it is cached, while the others wait.
    """
    rate = experiment.precision.compute
    if device.type == "cuda":
        if rate == "fp32" and torch.get_float32_matmul_precision() != "highest":
            rate = "tf32"
        name = torch.cuda.get_device_name(device)
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        found = experiment.hardware.found(name, total)
        tflops = found.peak_tflops(rate) if found else None
        peak = None if tflops is None else tflops * 1e12
    else:
        name = cpu_name()
        box: list[float | None] = [_cached_peak(name, rate, context) if context.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        peak = box[0]
    return peak, {"device": name, "peak_tflops": peak and peak / 1e12, "peak_rate": rate}


def _cached_peak(cpu: str, rate: str, context: WorkerContext) -> float:
    """Return the FLOP/s of this processor with the run's number of threads, measured once and cached."""
    path = cache_dir() / "cpu_peak.json"
    key = f"{cpu}, {context.threads} threads, {rate}, torch {torch.__version__}"
    known = read_json(path)
    if key not in known:
        context.doing("measuring the peak of this CPU")
        known[key] = _measure(torch.bfloat16 if rate == "bf16" else torch.float32)
        write_json(path, known)
    return float(known[key])


def _measure(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of MATMUL_REPEATS matmuls."""
    a, b = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype), torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype)
    best = float("inf")
    for _ in range(MATMUL_REPEATS):
        begin = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begin)
    return 2 * MATMUL_SIZE**3 / best

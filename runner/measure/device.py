"""Measure the time, peak memory and energy of a rank without waiting for its device, and find the peak FLOP/s for MFU."""

import ctypes
import gc
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshrunner.recipes.storage import cache_dir
from meshrunner.runner.config.devices import cpu_name
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.figures import row_keys
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.rundir import JsonFile
from meshrunner.runner.rundir.files import write_json

GIB = 2**30
MATMUL_SIZE, MATMUL_REPEATS = 1024, 12
"""Settings for measuring a CPU's peak FLOP/s: side length of the square matrices, and number of matmuls."""


class HostDevice:
    """Measures time and memory on a CPU. The time is read from the host's clock, because operators on a CPU are synchronous.
    The memory figure is the peak resident set size (VmHWM)."""

    keys: tuple[str, ...] = ("memory/peak_rss_gib",)
    """Keys, in events.jsonl, of the memory figures that a rank measures."""
    total_gib: float | None = None
    """Memory of the device in GiB; None on a CPU, because other ranks and programs share its memory."""
    _least: Sequence[float] = ()
    """Memory peaks from the last reset to the latest evaluation, in the order of `keys`; () without an evaluation."""

    def stamp(self) -> Any:
        """Return a time stamp of the moment at which the device completes the work issued so far."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two time stamps. The device must have reached both time stamps."""
        return float(end - begin)

    def peaks(self) -> list[float]:
        """Return the memory figures measured since the last reset, in the order of `keys`."""
        return [max(pair) for pair in zip_longest(self._peaks(), self._least, fillvalue=0.0)]

    @contextmanager
    def peaks_kept(self) -> Iterator[None]:
        """Exclude the `with` block from the memory peaks."""
        before = self.peaks()
        yield
        self.reset_peaks()
        self._least = before

    def _peaks(self) -> list[float]:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return [int(found[1]) * 1024 / GIB if found else 0.0]

    def joules(self) -> float:
        """Return the energy, in joules, that the device has used since a fixed time, or NaN if unknown."""
        return math.nan

    def row(self, peaks: dict[str, float]) -> dict[str, float | None]:
        """Return a row's memory figures from `peaks`, which are merged over ranks. Figures that this device lacks are None."""
        found: dict[str, float | None] = dict.fromkeys(row_keys("memory/")) | peaks
        if self.total_gib:
            for key in ("active", "reserved"):
                found[f"memory/peak_{key}_pct"] = 100 * peaks[f"memory/peak_{key}_gib"] / self.total_gib
        return found

    def release_cached(self) -> None:
        """Free the allocator's cached memory, so that the peak of reserved memory excludes the start-up."""

    def keep_active_peak(self) -> None:
        """Use the current peak of active memory as a lower bound of later peaks, because CUDA graph replays allocate nothing."""

    def reset_peaks(self) -> None:
        """Reset the memory peaks. In a container that forbids the reset, the peaks include the start-up."""
        self._least = ()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


class CudaDevice(HostDevice):
    """Measures time and memory on a GPU. CUDA events on the current stream give the time, the caching allocator the peaks."""

    keys = ("memory/peak_active_gib", "memory/peak_reserved_gib", "memory/alloc_retries", *HostDevice.keys)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total_gib = torch.cuda.get_device_properties(device).total_memory / GIB
        self.joules = energy_counter(str(torch.cuda.get_device_properties(device).uuid))  # type: ignore[method-assign]
        self._retries = 0
        self._active_in_graph = 0

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def _peaks(self) -> list[float]:
        stats = torch.cuda.memory_stats(self.device)
        active = max(stats["active_bytes.all.peak"], self._active_in_graph)
        peaks = active / GIB, stats["reserved_bytes.all.peak"] / GIB
        return [*peaks, float(stats["num_alloc_retries"] - self._retries), *super()._peaks()]

    @contextmanager
    def peaks_kept(self) -> Iterator[None]:
        retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"] - self._retries
        with super().peaks_kept():
            yield
        self._retries -= retries  # counts before and after the block add up, but `peaks` returns the larger value

    def release_cached(self) -> None:
        gc.collect()  # reference cycles keep tensors alive
        torch.cuda.empty_cache()

    def keep_active_peak(self) -> None:
        self._active_in_graph = torch.cuda.memory_stats(self.device)["active_bytes.all.peak"]

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self._retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        super().reset_peaks()


def energy_counter(uuid: str) -> Callable[[], float]:
    """Return a function that reads a GPU's energy counter: the joules used since the driver was loaded. The function returns
    NaN if NVML does not count the energy, as for MIG slices and GPUs older than Volta. uuid: the GPU's UUID, without `GPU-`."""
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device)):
            return lambda: math.nan
        read = nvml.nvmlDeviceGetTotalEnergyConsumption
    except (OSError, AttributeError):
        return lambda: math.nan
    return lambda: math.nan if read(device, ctypes.byref(millijoules)) else millijoules.value / 1000


def peak_flops(
    experiment: Experiment, device: torch.device, context: WorkerContext
) -> tuple[float | None, dict[str, Any]]:
    """Return the peak FLOP/s (None if unknown), and the device's name and peak as facts for summary.json.
    On CPUs, all ranks must call this function, but only rank 0 gets the peak."""
    rate = experiment.precision.compute
    if device.type == "cuda":
        if rate == "fp32" and torch.get_float32_matmul_precision() != "highest":
            rate = "tf32"
        name = torch.cuda.get_device_name(device)
        found = experiment.hardware.found(name, torch.cuda.get_device_properties(device).total_memory / GIB)
        tflops = found.peak_tflops(rate) if found else None
        peak = tflops and tflops * 1e12
    else:
        name, peak = cpu_name(), _cached_peak(rate, context) if context.records else None
        dist.barrier()  # work on other ranks would slow down the measurement
    return peak, {"device": name, "peak_tflops": peak and peak / 1e12, "peak_rate": rate}


def _cached_peak(rate: str, context: WorkerContext) -> float:
    """Return this CPU's peak FLOP/s for the run's number of threads. Read it from cpu_peak.json, or else measure and store it."""
    known = JsonFile.read(cache_dir() / "cpu_peak.json").as_json().get(_peak_key(rate, context))
    if known is None:
        context.doing("measuring the peak FLOP/s of this CPU")
        return measured_peak(rate, context)[0]
    return float(known["flops"] if isinstance(known, dict) else known)


def peak_remark(rate: str, context: WorkerContext) -> str:
    """Return the reason why MFU is unknown in steps that exceeded the peak FLOP/s. On a CPU, first measure the peak again."""
    if context.device_type == "cpu":
        return measured_peak(rate, context)[1]
    return f"MFU is unknown in steps whose FLOP/s exceeded the {rate} peak of this device; check hardware.peak.{rate}"


def measured_peak(rate: str, context: WorkerContext) -> tuple[float, str]:
    """Measure this CPU's peak. Store the best result in cpu_peak.json. Return it in FLOP/s, and text for `peak_remark`."""
    path, key = cache_dir() / "cpu_peak.json", _peak_key(rate, context)
    known = JsonFile.read(path).as_json()
    before = known.get(key)
    before = before if isinstance(before, dict) else {"flops": before or 0.0, "measured": "an earlier day"}
    best = max(_measure(torch.bfloat16 if rate == "bf16" else torch.float32), before["flops"])
    if best > before["flops"]:
        known[key] = {"flops": best, "measured": time.strftime("%Y-%m-%d")}
        write_json(path, known)
    return best, (
        f"MFU is unknown in steps whose FLOP/s exceeded the CPU's peak, which was measured on {before['measured']}. "
        f"The measured peak of {before['flops'] / 1e12:.4g} TFLOP/s may be too low. A new measurement found "
        f"{best / 1e12:.4g} TFLOP/s"
    )


def _peak_key(rate: str, context: WorkerContext) -> str:
    return f"{cpu_name()}, {context.threads} threads, {rate}, torch {torch.__version__}"


def _measure(dtype: torch.dtype) -> float:
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE).to(dtype)
    best = float("inf")
    for _ in range(MATMUL_REPEATS):
        begin = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begin)
    return 2 * MATMUL_SIZE**3 / best

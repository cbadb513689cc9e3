"""Rates at which a device executes the events of a trace, derived from its option of the `hardware` group."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.predict.timing import collectives

Fp32Rate = Literal["fp32", "tf32"]
"""Field of `hardware.peak` that holds the rate of fp32 matmuls."""


class GPURates:
    """Data-sheet rates times the share of them that programs reach."""

    overlaps = True
    """Whether streams run concurrently and the host runs ahead of them."""

    def __init__(self, hardware: GPU, fp32_rate: Fp32Rate, workers: int) -> None:
        self._hardware, self._fp32_rate, self._workers = hardware, fp32_rate, workers
        efficiency = hardware.efficiency
        self.bytes_per_second = hardware.memory_bandwidth * 1e9 * efficiency.memory
        """Memory bandwidth that elementwise operators reach."""
        self.kernel_s, self.host_s, self.contention = efficiency.kernel_s, efficiency.host_s, efficiency.contention
        """See `hardware.Efficiency`."""

    def flops_per_second(self, kind: str, dtype: str) -> float:
        """Return the FLOP/s that operators of an `Operator.kind` reach; raises ConfigError if the rate is unknown."""
        hardware = self._hardware
        rate, share = _peak_rate(dtype, self._fp32_rate)
        peak = hardware.peak_tflops(rate)
        if peak is None:
            raise ConfigError(
                f"hardware.peak.{rate} of {hardware.name} is not known, so the speed of {kind} in {dtype} cannot be predicted: "
                f"set hardware.peak.{rate} (TFLOP/s) or choose another precision"
            )
        reached: float = getattr(hardware.efficiency, kind)
        return peak * 1e12 * share * reached

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Return the seconds of a collective; for the arguments see `collectives.seconds`."""
        return collectives.seconds(name, ranks, nbytes, self._hardware, self._workers)

    def waiting_s(self, ranks: int, work_s: float) -> float:
        """Return 0: the efficiencies were fitted to runs of several GPUs and include waits for the slowest rank."""
        return 0.0


class CPURates:
    """Measured rates. Nothing overlaps: concurrent work would take cores away from compute."""

    overlaps = False
    host_s = contention = 0.0

    def __init__(self, hardware: CPU) -> None:
        assert hardware.speed is not None
        self._speed = hardware.speed
        self.bytes_per_second = self._speed.memory_bandwidth * 1e9
        self.kernel_s = self._speed.operator_s

    def flops_per_second(self, kind: str, dtype: str) -> float:
        """See `GPURates`."""
        speed = self._speed
        rate, share = _peak_rate(dtype, "fp32")
        tflops = speed.fp32_tflops if rate == "fp32" else speed.bf16_tflops if rate == "bf16" else None
        if tflops is None:
            raise ConfigError(
                f"hardware.speed.{rate}_tflops is not known, so the speed of {kind} in {dtype} cannot be predicted: "
                f"calibrate with runs in {rate} or choose another precision"
            )
        return tflops * 1e12 * share * (1.0 if kind == "matmul" else speed.attention)

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """See `GPURates`. All links count as equal; gloo's reduce-scatter is an all-reduce of a copy."""
        if len(ranks) < 2:
            return 0.0
        passes = 2 if name in ("all_reduce", "reduce_scatter") else 1
        return self._speed.collective_s + passes * nbytes / (self._speed.link_bandwidth * 1e9)

    def waiting_s(self, ranks: int, work_s: float) -> float:
        """
        Return how long a collective waits for its slowest rank after `work_s` seconds of work on each.

        It is the expected maximum of `ranks` normal deviations (Blom), which grow with work like a random walk.
        """
        if ranks < 2:
            return 0.0
        return self._speed.jitter * math.sqrt(work_s) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


Rates = GPURates | CPURates


def device_rates(hardware: GPU | CPU, fp32_rate: Fp32Rate, workers: int) -> Rates:
    """Return the rates of this hardware with `workers` processes per node; a CPU needs a known `speed`."""
    return GPURates(hardware, fp32_rate, workers) if isinstance(hardware, GPU) else CPURates(hardware)


def _peak_rate(dtype: str, fp32_rate: Fp32Rate) -> tuple[str, float]:
    """Return the field of `hardware.peak` for matmuls in a dtype, and the share of it that is the dtype's peak."""
    if dtype in ("bfloat16", "float16"):
        return "bf16", 1.0
    if dtype.startswith("float8"):
        return "fp8", 1.0
    if dtype == "float32":
        return fp32_rate, 1.0
    if dtype == "float64":
        return "fp32", 0.5  # on vector units; tensor cores of data-centre GPUs reach twice as much
    raise ConfigError(f"the rate of matmuls in {dtype} is not known")

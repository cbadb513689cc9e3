"""How fast a device is at each thing that a log holds, from its option of the `hardware` group."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal, Protocol

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.predict.timing import collectives

Rate = Literal["fp32", "tf32"]
"""What products of fp32 are multiplied at, a field of `hardware.peak`."""
_STANDARD_NORMAL = NormalDist()


class Rates(Protocol):
    """What a clock asks a device."""

    overlaps: bool
    """Whether it has streams, which work at the same time, and a host, which goes on meanwhile."""
    bytes_per_second: float
    """Of operators that only read and write."""
    kernel_s: float
    """What an operator takes on the device besides its work."""
    host_s: float
    """What the host takes to issue it."""
    contention: float
    """See `Efficiency`."""

    def flops_per_second(self, kind: str, dtype: str) -> float:
        """
        What matrix products or attention reach.

        Args:
            kind: of `log.Operator`, not memory.

        Raises:
            ConfigError: it is not known.
        """

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Seconds of a collective; the arguments as of `collectives.seconds`."""

    def waiting_s(self, ranks: int, work_s: float) -> float:
        """How long a collective waits for the slowest rank, if each has worked for so long since the last one."""


def rates(hardware: GPU | CPU, matmul: Rate, workers: int) -> Rates:
    """Those of an option, with so many workers on a node; of a CPU, one whose `speed` is known."""
    return OfGPU(hardware, matmul, workers) if isinstance(hardware, GPU) else OfCPU(hardware)


class OfGPU:
    """A data sheet's rates times the shares of them that are reached."""

    overlaps = True

    def __init__(self, hardware: GPU, matmul: Rate, workers: int) -> None:
        self._hardware, self._matmul, self._workers = hardware, matmul, workers
        efficiency = hardware.efficiency
        self.bytes_per_second = hardware.memory_bandwidth * 1e9 * efficiency.memory
        self.kernel_s, self.host_s, self.contention = efficiency.kernel_s, efficiency.host_s, efficiency.contention

    def flops_per_second(self, kind: str, dtype: str) -> float:
        """See `Rates`."""
        hardware = self._hardware
        rate, share = _rate(dtype, self._matmul)
        peak = hardware.peak_tflops(rate)
        if peak is None:
            raise ConfigError(
                f"hardware.peak.{rate} of {hardware.name} is not known, so no speed can be predicted of {kind} in {dtype}: "
                f"set hardware.peak.{rate} (TFLOP/s), or choose another precision"
            )
        reached: float = getattr(hardware.efficiency, kind)
        return peak * 1e12 * share * reached

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """See `Rates`."""
        return collectives.seconds(name, ranks, nbytes, self._hardware, self._workers)

    def waiting_s(self, ranks: int, work_s: float) -> float:
        """None, so far as the shares were fitted to runs of several GPUs."""
        return 0.0


class OfCPU:
    """Measured rates. One thing happens after another: what overlaps would take cores from compute."""

    overlaps = False
    host_s = contention = 0.0

    def __init__(self, hardware: CPU) -> None:
        assert hardware.speed is not None
        self._speed = hardware.speed
        self.bytes_per_second = self._speed.memory_bandwidth * 1e9
        self.kernel_s = self._speed.operator_s

    def flops_per_second(self, kind: str, dtype: str) -> float:
        """See `Rates`."""
        speed = self._speed
        rate, share = _rate(dtype, "fp32")
        tflops = speed.fp32_tflops if rate == "fp32" else speed.bf16_tflops if rate == "bf16" else None
        if tflops is None:
            raise ConfigError(
                f"hardware.speed.{rate}_tflops is not known, so no speed can be predicted of {kind} in {dtype}: "
                f"calibrate with runs in {rate}, or choose another precision"
            )
        return tflops * 1e12 * share * (1.0 if kind == "matmul" else speed.attention)

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """See `Rates`; all links are one. Gloo's reduce-scatter is an all-reduce of a copy."""
        if len(ranks) < 2:
            return 0.0
        passes = 2 if name in ("all_reduce", "reduce_scatter") else 1
        return self._speed.collective_s + passes * nbytes / (self._speed.link_bandwidth * 1e9)

    def waiting_s(self, ranks: int, work_s: float) -> float:
        """The expected maximum of as many normal deviations (Blom), which add up like a random walk's steps."""
        if ranks < 2:
            return 0.0
        return self._speed.jitter * math.sqrt(work_s) * _STANDARD_NORMAL.inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _rate(dtype: str, matmul: Rate) -> tuple[str, float]:
    """The field of `hardware.peak` that a dtype is multiplied at, and the share of it that is its peak."""
    if dtype in ("bfloat16", "float16"):
        return "bf16", 1.0
    if dtype.startswith("float8"):
        return "fp8", 1.0
    if dtype == "float32":
        return matmul, 1.0
    if dtype == "float64":
        return "fp32", 0.5  # vector units; twice as much on the tensor cores of data-centre GPUs
    raise ConfigError(f"no rate is known of matrix products in {dtype}")

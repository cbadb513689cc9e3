"""The `hardware` group: a device's peak FLOP/s, memory and bandwidths, the reference of MFU and memory percentages."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option, Section


class PeakFlops(Section):
    """Dense matrix-product rates in TFLOP/s, without structured sparsity; null: unknown or not supported."""

    fp32: float | None = Field(gt=0)
    """True fp32, precision.matmul=highest, in TFLOP/s; null: unknown or not supported."""
    tf32: float | None = Field(gt=0)
    """fp32 tensors multiplied as TF32, precision.matmul=high, in TFLOP/s."""
    bf16: float | None = Field(gt=0)
    """bf16 (and fp16) tensor cores, in TFLOP/s."""
    fp8: float | None = Field(gt=0)
    """float8 tensor cores, in TFLOP/s."""


class Efficiency(Section):
    """What real programs make of a data sheet's rates, and what they lose besides: constants of `plan`'s speeds."""

    matmul: float = Field(gt=0, le=1)
    """Share of the peak rate of their dtype that matrix products reach."""
    attention: float = Field(gt=0, le=1)
    """Share of the peak rate that fused attention reaches in forward."""
    attention_backward: float = Field(gt=0, le=1)
    """Share of the peak rate that fused attention reaches in backward."""
    memory: float = Field(gt=0, le=1)
    """Share of the memory bandwidth that operators reach which only read and write."""
    contention: float = Field(ge=0, le=1)
    """Part of the time of communication at the same time as compute by which it makes compute longer."""
    kernel_s: float = Field(ge=0)
    """Latency of an operator on the device, in seconds."""
    host_s: float = Field(ge=0)
    """Time that the host needs to issue an operator, in seconds."""


class Calibrated(Section):
    """What the constants of `plan`'s speeds were fitted to."""

    runs: Count
    """Combinations that had been measured."""
    error_pct: float = Field(ge=0)
    """Largest error, in percent, of the speed of one of them as the others predict it."""


class CPUSpeed(Section):
    """What a worker on a processor reaches: rates, not shares of a data sheet's, as found by `meshrunner calibrate`."""

    fp32_tflops: float | None = Field(gt=0)
    """Rate of matrix products in fp32, in TFLOP/s; null: no run was in fp32."""
    bf16_tflops: float | None = Field(gt=0)
    """Rate of matrix products in bf16, in TFLOP/s; null: no run was in bf16."""
    attention: float = Field(gt=0)
    """Rate of fused attention as a share of that of matrix products."""
    memory_bandwidth: float = Field(gt=0)
    """Bandwidth of operators that only read and write, in GB/s."""
    operator_s: float = Field(ge=0)
    """What an operator takes besides its arithmetic, in seconds."""
    link_bandwidth: float = Field(gt=0)
    """Bandwidth of collectives, in GB/s of the whole."""
    collective_s: float = Field(ge=0)
    """Latency of a collective, in seconds."""
    jitter: float = Field(ge=0)
    """
    How unevenly workers work: standard deviation of what takes a worker one second, in seconds. At a collective all wait for the
    slowest.
    """


class Hardware(Option):
    """A device."""

    kinds: ClassVar[dict[str, str]] = {
        "auto": "meshrunner.runner.config.hardware:AutoHardware",
        "cpu": "meshrunner.runner.config.hardware:CPU",
        "gpu": "meshrunner.runner.config.hardware:GPU",
    }

    def found(self, device_name: str, memory_gib: float) -> Hardware | None:
        """The option that describes a device; None when its peak is unknown."""
        return self

    def peak_tflops(self, rate: str) -> float | None:
        """Peak TFLOP/s of one device at a rate of `PeakFlops`; None when unknown."""
        return None


class GPU(Hardware):
    """An accelerator, from its data sheet."""

    name: str
    """Name shown in tables."""
    match: str
    """Regular expression for the name that the driver reports."""
    memory_gib: float = Field(gt=0, le=1e6)
    """Device memory in GiB, as torch reports it or the data sheet's GB converted."""
    peak: PeakFlops
    """Dense matrix-product rates in TFLOP/s by dtype, without structured sparsity: what MFU is a percentage of."""
    memory_bandwidth: float = Field(ge=1e-3)
    """Bandwidth of device memory in GB/s."""
    link_bandwidth: float = Field(ge=1e-3)
    """Bandwidth of a device to the others of its node in GB/s, all links together, one direction."""
    network_bandwidth: float = Field(ge=1e-3)
    """Bandwidth of a device to other nodes in GB/s, one direction."""
    devices_per_node: Count
    """Devices of a node: the workers that `submit` requests where launch.workers is auto."""
    # Runs of before had neither of these.
    reserved_elsewhere_gib: float = Field(1.5, ge=0)
    """Device memory in GiB that a process takes outside torch's allocator: the driver's context, NCCL."""
    efficiency: Efficiency = Efficiency(
        matmul=0.48, attention=0.36, attention_backward=0.29, memory=0.8, contention=0.1, kernel_s=2e-6, host_s=6e-6
    )
    """Shares of the rates above that are reached, and latencies."""
    calibrated: Calibrated | None = None
    """What `efficiency` was fitted to by `meshrunner calibrate`; null: to no run of this device."""

    def found(self, device_name: str, memory_gib: float) -> Hardware | None:
        # Named by the user, whatever the driver calls it; but a slice of a GPU (MIG) has not its peak.
        sliced = re.search(r"\bMIG\b", device_name) and not re.search(self.match, device_name, re.IGNORECASE)
        return None if sliced else self

    def peak_tflops(self, rate: str) -> float | None:
        value = getattr(self.peak, rate)
        return None if value is None else float(value)


class CPU(Hardware):
    """The processor. Its peak is measured, by a matrix product with the run's number of threads."""

    # Runs of before had neither of these.
    speed: CPUSpeed | None = None
    """What `plan` predicts speeds from; null: it predicts none."""
    calibrated: Calibrated | None = None
    """What `speed` was fitted to by `meshrunner calibrate`."""


class AutoHardware(Hardware):
    """The device found on the node where the run starts."""

    def found(self, device_name: str, memory_gib: float) -> Hardware | None:
        known = [gpu for gpu in known_gpus() if re.search(gpu.match, device_name, re.IGNORECASE)]
        # One name may stand for several memory sizes (H100 80 GB and 96 GB): the nearest.
        return min(known, key=lambda gpu: abs(gpu.memory_gib - memory_gib), default=None)


def known_gpus() -> list[GPU]:
    """The shipped `conf/hardware` files that describe a GPU."""
    from omegaconf import OmegaConf  # here: every worker imports this module, few call this

    folder = files("meshrunner.conf") / "hardware"
    loaded = [
        OmegaConf.to_container(OmegaConf.create(f.read_text())) for f in folder.iterdir() if f.name.endswith(".yaml")
    ]
    return [GPU.model_validate(c) for c in loaded if isinstance(c, dict) and c.get("kind") == "gpu"]

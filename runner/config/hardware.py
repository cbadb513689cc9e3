"""The `hardware` group: peak FLOP/s, memory and bandwidths of a device. MFU and memory percentages are relative to them."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option, Section


class PeakFlops(Section):
    """Dense matmul rates in TFLOP/s, without structured sparsity; null: unknown or not supported."""

    fp32: float | None = Field(gt=0)
    """Rate of true fp32 matmuls (precision.matmul=highest), in TFLOP/s; null: unknown or not supported."""
    tf32: float | None = Field(gt=0)
    """Rate of fp32 tensors multiplied as TF32 (precision.matmul=high), in TFLOP/s."""
    bf16: float | None = Field(gt=0)
    """Rate of bf16 (and fp16) tensor cores, in TFLOP/s."""
    fp8: float | None = Field(gt=0)
    """Rate of float8 tensor cores, in TFLOP/s."""


class Efficiency(Section):
    """Fractions of the data sheet's rates that programs reach, and fixed times. `plan` predicts speeds from these constants."""

    matmul: float = Field(gt=0, le=1)
    """Fraction of the peak rate that matmuls reach."""
    attention: float = Field(gt=0, le=1)
    """Fraction of the peak rate that fused attention reaches in forward."""
    attention_backward: float = Field(gt=0, le=1)
    """Fraction of the peak rate that fused attention reaches in backward."""
    memory: float = Field(gt=0, le=1)
    """Fraction of the memory bandwidth that elementwise operators reach."""
    contention: float = Field(ge=0, le=1)
    """Seconds that compute loses per second in which communication overlaps it."""
    kernel_s: float = Field(ge=0)
    """Fixed time per operator on the device, in seconds."""
    host_s: float = Field(ge=0)
    """Time the host needs to launch an operator, in seconds."""


class Calibrated(Section):
    """The measured runs that `meshrunner calibrate` fitted the constants to."""

    runs: Count
    """Number of measured combinations."""
    error_pct: float = Field(ge=0)
    """Largest error of a predicted speed, in percent. Constants are fitted to all combinations but the predicted one."""


class CPUSpeed(Section):
    """Rates that one worker reaches on this CPU, fitted by `meshrunner calibrate`."""

    fp32_tflops: float | None = Field(gt=0)
    """Rate of fp32 matmuls in TFLOP/s; null: no measured run was in fp32."""
    bf16_tflops: float | None = Field(gt=0)
    """Rate of bf16 matmuls in TFLOP/s; null: no measured run was in bf16."""
    attention: float = Field(gt=0)
    """Rate of fused attention as a fraction of the matmul rate."""
    memory_bandwidth: float = Field(gt=0)
    """Memory bandwidth that elementwise operators reach, in GB/s."""
    operator_s: float = Field(ge=0)
    """Fixed time per operator, in seconds."""
    link_bandwidth: float = Field(gt=0)
    """Bandwidth of collectives in GB/s, counting the bytes of the unsharded tensor."""
    collective_s: float = Field(ge=0)
    """Latency of a collective, in seconds."""
    jitter: float = Field(ge=0)
    """Standard deviation of a worker's time for one second of work, in seconds. Collectives wait for the slowest worker."""


class Hardware(Option):
    """A type of device."""

    kinds: ClassVar[dict[str, str]] = {
        "auto": "meshrunner.runner.config.hardware:AutoHardware",
        "cpu": "meshrunner.runner.config.hardware:CPU",
        "gpu": "meshrunner.runner.config.hardware:GPU",
    }

    def found(self, device_name: str, memory_gib: float) -> Hardware | None:
        """Return this option, or for `auto` the option that describes the device; None if the device's rates are unknown."""
        return self

    def peak_tflops(self, rate: str) -> float | None:
        """Return the peak TFLOP/s of one device for a field of `PeakFlops`; None if the rate is unknown."""
        return None


class GPU(Hardware):
    """An accelerator, as its data sheet describes it."""

    name: str
    """Name shown in tables."""
    match: str
    """Regular expression that matches the name the driver reports."""
    memory_gib: float = Field(gt=0, le=1e6)
    """Device memory in GiB: the value torch reports, or the data sheet's GB converted to GiB."""
    peak: PeakFlops
    """Dense matmul rates in TFLOP/s by dtype, without structured sparsity. MFU is relative to these rates."""
    memory_bandwidth: float = Field(ge=1e-3)
    """Bandwidth of device memory in GB/s."""
    link_bandwidth: float = Field(ge=1e-3)
    """Bandwidth from a device to the other devices of its node in GB/s, over all links, in one direction."""
    network_bandwidth: float = Field(ge=1e-3)
    """Bandwidth from a device to other nodes in GB/s, in one direction."""
    devices_per_node: Count
    """Devices per node. `submit` requests this number if launch.workers is auto."""
    # Older run directories lack the following keys, so they need defaults.
    reserved_elsewhere_gib: float = Field(1.5, ge=0)
    """Device memory in GiB that a process uses outside torch's allocator, such as the CUDA context and NCCL buffers."""
    efficiency: Efficiency = Efficiency.model_construct(  # builds no validator, which would slow down every import
        matmul=0.48, attention=0.36, attention_backward=0.29, memory=0.8, contention=0.1, kernel_s=2e-6, host_s=6e-6
    )
    """Fractions of this device's rates that programs reach, and fixed times per operator."""
    calibrated: Calibrated | None = None
    """The runs that `meshrunner calibrate` fitted `efficiency` to; null: `efficiency` is not fitted."""

    def found(self, device_name: str, memory_gib: float) -> Hardware | None:
        # Accept any name, because the user chose this option, except the name of a MIG slice: a slice has a lower peak.
        sliced = re.search(r"\bMIG\b", device_name) and not re.search(self.match, device_name, re.IGNORECASE)
        return None if sliced else self

    def peak_tflops(self, rate: str) -> float | None:
        found: float | None = getattr(self.peak, rate)
        return found


class CPU(Hardware):
    """A CPU. Its peak is measured with a matmul that uses the run's number of threads."""

    # Older run directories lack the following keys, so they need defaults.
    speed: CPUSpeed | None = None
    """Rates that `plan` predicts speeds from; null: `plan` predicts no speed."""
    calibrated: Calibrated | None = None
    """The runs that `meshrunner calibrate` fitted `speed` to."""


class AutoHardware(Hardware):
    """The device found on the node where the run starts."""

    def found(self, device_name: str, memory_gib: float) -> Hardware | None:
        known = [gpu for gpu in known_gpus() if re.search(gpu.match, device_name, re.IGNORECASE)]
        # Devices of one name may differ in memory, such as H100 80 GB and 96 GB.
        return min(known, key=lambda gpu: abs(gpu.memory_gib - memory_gib), default=None)


def known_gpus() -> list[GPU]:
    """Return the options in conf/hardware that describe a GPU."""
    from meshrunner.runner import shipped  # not at the top: few workers call this function

    options = [shipped.values("hardware", option) for option in shipped.options("hardware")]
    return [GPU.model_validate(values) for values in options if values.get("kind") == "gpu"]

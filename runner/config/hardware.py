"""The `hardware` group: peak FLOP/s, memory and bandwidths of a device, to which MFU and memory percentages are relative."""

import re
from typing import ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option, Section


class PeakFlops(Section):
    """Dense matmul rates in TFLOP/s, without structured sparsity; null: unknown or not supported."""

    fp32: float | None = Field(gt=0)
    """Rate of true fp32 matmuls (precision.matmul=highest), in TFLOP/s; null: unknown or not supported."""
    tf32: float | None = Field(gt=0)
    """Rate of matmuls of fp32 tensors in TF32 (precision.matmul=high), in TFLOP/s."""
    bf16: float | None = Field(gt=0)
    """Rate of bf16 (and fp16) matmuls on tensor cores, in TFLOP/s."""
    fp8: float | None = Field(gt=0)
    """Rate of float8 matmuls on tensor cores, in TFLOP/s."""


class Efficiency(Section):
    """Constants from which `plan` predicts speeds: the share of each data-sheet rate that kernels reach, and fixed times."""

    matmul: float = Field(gt=0, le=1)
    """Fraction of the peak rate that matmuls reach."""
    attention: float = Field(gt=0, le=1)
    """Fraction of the peak rate that fused attention reaches in forward."""
    attention_backward: float = Field(gt=0, le=1)
    """Fraction of the peak rate that fused attention reaches in backward."""
    memory: float = Field(gt=0, le=1)
    """Fraction of the memory bandwidth that elementwise operators reach."""
    contention: float = Field(ge=0, le=1)
    """Slowdown of compute by communication: seconds of compute lost per second of overlap between compute and communication."""
    kernel_s: float = Field(ge=0)
    """Fixed time per operator on the device, in seconds."""
    host_s: float = Field(ge=0)
    """Time the host needs to launch an operator, in seconds."""


class Calibrated(Section):
    """The quality of a fit by `meshrunner calibrate`, which fits the constants of a device to measured runs."""

    runs: Count
    """Number of measured combinations of settings; several runs of one combination count once."""
    error_pct: float = Field(ge=0)
    """Largest error of a predicted speed in percent, from leave-one-out cross-validation over the measured combinations."""


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
    """Bandwidth of collectives in GB/s: bytes of the unsharded tensor divided by the time of an all-gather."""
    collective_s: float = Field(ge=0)
    """Latency of a collective, in seconds."""
    jitter: float = Field(ge=0)
    """Standard deviation, in seconds, of a worker's delay after 1 second of work. Collectives wait for the slowest worker."""


class Hardware(Option):
    """A type of device."""

    kinds: ClassVar[dict[str, str]] = {
        "auto": "meshrunner.runner.config.hardware:AutoHardware",
        "cpu": "meshrunner.runner.config.hardware:CPU",
        "gpu": "meshrunner.runner.config.hardware:GPU",
    }

    def found(self, device_name: str, memory_gib: float) -> "Hardware | None":
        """Return the option with a device's rates, or None if no option matches. With hardware=auto, search conf/hardware."""
        return self

    def peak_tflops(self, rate: str) -> float | None:
        """Return the peak TFLOP/s of one device; None if unknown. `rate` is a field of `PeakFlops`, such as `bf16`."""
        return None


class GPU(Hardware):
    """A GPU with the rates from its data sheet."""

    name: str
    """Name shown in tables."""
    match: str
    """Regular expression that matches the device name that the driver reports."""
    memory_gib: float = Field(gt=0, le=1e6)
    """Device memory in GiB: the value torch reports, or the data sheet's GB converted to GiB."""
    peak: PeakFlops
    """Dense matmul rates in TFLOP/s by dtype, without structured sparsity. MFU is relative to these peak rates."""
    memory_bandwidth: float = Field(ge=1e-3)
    """Bandwidth of device memory in GB/s."""
    link_bandwidth: float = Field(ge=1e-3)
    """Bandwidth in GB/s from a device to the other devices of its node, over all links together, in one direction."""
    network_bandwidth: float = Field(ge=1e-3)
    """Bandwidth in GB/s from a device to other nodes, in one direction."""
    devices_per_node: Count
    """Number of devices per node, which `submit` requests if launch.workers is auto."""
    # Older run directories lack the following keys, so they need defaults.
    compute_capability: float | None = Field(None, gt=0)
    """Compute capability of an NVIDIA device, such as 9.0, by which torch chooses attention kernels; null: unknown or none."""
    reserved_elsewhere_gib: float = Field(1.5, ge=0)
    """Device memory in GiB that a process uses outside torch's allocator, such as the CUDA context and NCCL buffers."""
    efficiency: Efficiency = Efficiency.model_construct(  # avoids building a validator, which slows down imports
        matmul=0.48, attention=0.36, attention_backward=0.29, memory=0.8, contention=0.1, kernel_s=2e-6, host_s=6e-6
    )
    """Constants for predicting speeds: the share of each device rate that kernels reach, and fixed times per operator."""
    calibrated: Calibrated | None = None
    """Quality of the fit of `efficiency` by `meshrunner calibrate`; null: `efficiency` is not fitted."""

    def found(self, device_name: str, memory_gib: float) -> Hardware | None:
        # The user chose this option, so accept any device. Refuse only a MIG slice that `match` does not name.
        sliced = re.search(r"\bMIG\b", device_name) and not re.search(self.match, device_name, re.IGNORECASE)
        return None if sliced else self

    def peak_tflops(self, rate: str) -> float | None:
        found: float | None = getattr(self.peak, rate)
        return found


class CPU(Hardware):
    """A CPU, whose peak FLOP/s is measured with matmuls on the run's number of threads."""

    # Older run directories lack the following keys, so they need defaults.
    speed: CPUSpeed | None = None
    """Rates from which `plan` predicts speeds; null: `plan` predicts no speed."""
    calibrated: Calibrated | None = None
    """Quality of the fit of `speed` by `meshrunner calibrate`; null: `speed` is not fitted."""


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

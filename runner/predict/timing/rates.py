"""Computes the speed of operators and the duration of collectives on the GPU or CPU that `hardware` describes.

The constants of GPU collectives describe nodes of 8 H100s, with NVSwitch inside the node and one 400 Gbit/s network adapter
per device between nodes. The constants come from meta-pytorch/autoparallel (`cost_models/nccl_cost_model.py`), where they
are fitted to nccl-tests results and NCCL's tuning tables.

The following assumptions of the model are not measured. Latencies are the same on all hardware. Bandwidth within a node is
proportional to link_bandwidth, and between nodes to network_bandwidth. No two groups use the same links at the same time. A group
uses only the network adapters of its own devices: for example, a group with one rank per node uses one adapter per node. A group
that is spread unevenly over nodes runs at the speed of the node with the fewest ranks. All collectives are rings, except that an
all-reduce is a tree if a tree is faster. Small all-gathers with one device per node are faster in NCCL than in this model. A
broadcast takes as long as an all-gather. An all-to-all has the latency of an all-gather.
"""

import math
from collections import Counter
from statistics import NormalDist
from typing import Literal

import numpy as np

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.hardware import CPU, GPU

GB, MB = 1e9, 1e6
LINK_BANDWIDTH = 450.0
"""`link_bandwidth` of the H100 in GB/s. On another device, NODE_BANDWIDTH is scaled by link_bandwidth / LINK_BANDWIDTH."""
NODE_BANDWIDTH = ((2, 537.0), (4, 434.0), (8, 394.0))
"""Pairs (number of ranks, bandwidth in GB/s) within a node. The bandwidth is the size of the whole buffer divided by the
transfer time of an all-gather or reduce-scatter."""
NODE_LATENCY = ((2, 8e-6), (4, 17e-6), (8, 30e-6))
"""Pairs (number of ranks, latency of an all-gather or reduce-scatter in seconds) within a node."""
RAMP = ((8 * MB, 0.68), (16 * MB, 0.79), (32 * MB, 0.87))
"""Pairs (bytes per rank, fraction of the network bandwidth that a collective of this size reaches)."""
STEP_IN_NODE, STEP_ACROSS = 3.4e-6, 14e-6
"""Seconds per ring step, within a node and between nodes. A node of 8 devices adds 7 x 3.4 + 14 = 38 microseconds to a ring."""
TREE = 0.7
"""Bandwidth of a tree all-reduce, relative to that of a ring all-reduce."""

Fp32Rate = Literal["fp32", "tf32"]
"""Field of `hardware.peak` that gives the speed of fp32 matmuls: `tf32` if torch may run them in TF32, else `fp32`."""


class GPURates:
    """Rates that programs reach on a GPU: its data-sheet rates times the fractions in `hardware.efficiency`."""

    overlaps = True
    """Whether streams run concurrently and the host runs ahead of them."""

    def __init__(self, hardware: GPU, fp32_rate: Fp32Rate, workers: int) -> None:
        self._hardware, self._fp32_rate, self._workers = hardware, fp32_rate, workers
        efficiency = hardware.efficiency
        self.bytes_per_second = hardware.memory_bandwidth * GB * efficiency.memory
        """Memory bandwidth that elementwise operators reach."""
        self.kernel_s, self.host_s, self.contention = efficiency.kernel_s, efficiency.host_s, efficiency.contention
        """Overheads of operators and of overlapped communication (see `hardware.Efficiency`)."""

    def flops_per_second(self, kind: str, dtype: str) -> float:
        """Return the FLOP/s that operators of one kind and dtype reach. Raise ConfigError if the rate is unknown."""
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
        """Return the duration of a collective in seconds. A group of one rank takes 0 seconds. The duration never decreases if
        `nbytes` increases or if the same ranks are spread evenly over more nodes. ranks: global ranks of the group, numbered
        node by node; nbytes: bytes of the whole buffer (see `trace_events.Collective`)."""
        n, hardware = len(ranks), self._hardware
        if n < 2:
            return 0.0
        on_node = Counter(rank // self._workers for rank in ranks).values()
        nodes, fewest, most = len(on_node), min(on_node), max(on_node)
        latency = _interpolate(NODE_LATENCY, n)
        transfer = nbytes / (_interpolate(NODE_BANDWIDTH, n) * GB * hardware.link_bandwidth / LINK_BANDWIDTH)
        if nodes > 1:
            latency = STEP_ACROSS * nodes + STEP_IN_NODE * (n - nodes)
            # In a ring, all parts but one cross each node boundary. A node's adapters that belong to the group share the load.
            sent = nbytes * (n - fewest) / n if name == "all_to_all" else nbytes * (n - 1) / n / fewest
            ramp = _interpolate(RAMP, nbytes / n)
            # Data that crosses the network also moves within the nodes, so the slower of the two transfers counts.
            transfer = max(transfer, sent / (hardware.network_bandwidth * GB * ramp))
        if name != "all_reduce":
            return latency + transfer
        if nodes == 1:
            return latency + 2 * transfer  # this latency covers both the reduce-scatter and the all-gather
        # Take the faster of a ring (reduce-scatter and all-gather) and a tree, in which a node's switch adds latency only once.
        up_and_down = (_interpolate(NODE_LATENCY, most) if most > 1 else 0.0) + 2 * STEP_ACROSS * math.log2(nodes)
        return min(2 * (latency + transfer), up_and_down + 2 * transfer / TREE)

    def waiting_s(self, ranks: int, work_s: float) -> float:
        """Return 0, because `hardware.efficiency` was fitted to multi-GPU runs and thus includes waits for the slowest rank."""
        return 0.0


class CPURates:
    """Measured rates of a CPU. Work is assumed not to overlap, because communication takes cores away from compute."""

    overlaps = False
    host_s = contention = 0.0

    def __init__(self, hardware: CPU) -> None:
        assert hardware.speed is not None
        self._speed = hardware.speed
        self.bytes_per_second = self._speed.memory_bandwidth * GB
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
        """See `GPURates`. All links are assumed equally fast. Gloo runs a reduce-scatter as an all-reduce, in two passes."""
        if len(ranks) < 2:
            return 0.0
        passes = 2 if name in ("all_reduce", "reduce_scatter") else 1
        return self._speed.collective_s + passes * nbytes / (self._speed.link_bandwidth * GB)

    def waiting_s(self, ranks: int, work_s: float) -> float:
        """Return the seconds that a collective waits for its slowest rank after `work_s` seconds of work on each rank. The wait
        is the expected maximum of `ranks` normally distributed delays (Blom's formula). The standard deviation of the delays is
        proportional to the square root of `work_s`, as in a random walk."""
        if ranks < 2:
            return 0.0
        return self._speed.jitter * math.sqrt(work_s) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


Rates = GPURates | CPURates


def _peak_rate(dtype: str, fp32_rate: Fp32Rate) -> tuple[str, float]:
    """Return a field of `hardware.peak` and a factor (0.5 for fp64, else 1). The peak rate in `dtype` is field x factor."""
    if dtype in ("bfloat16", "float16"):
        return "bf16", 1.0
    if dtype.startswith("float8"):
        return "fp8", 1.0
    if dtype == "float32":
        return fp32_rate, 1.0
    if dtype == "float64":
        return "fp32", 0.5  # rate of the vector units; the tensor cores of data-centre GPUs are twice as fast
    raise ConfigError(f"the rate of matmuls in {dtype} is not known")


def _interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Interpolate linearly between points. Outside the range of the points, return the value of the nearest point."""
    xs, ys = zip(*points, strict=True)
    return float(np.interp(x, xs, ys))

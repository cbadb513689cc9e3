"""
Time of a collective among devices of one node or of several.

The constants describe H100s, 8 per node, with NVSwitch inside the node and one 400 Gbit/s network adapter per device between
nodes. They come from nccl-tests results and NCCL's tuning tables, as fitted in meta-pytorch/autoparallel
(`cost_models/nccl_cost_model.py`). The following is assumed, not measured:

- Other hardware differs only in bandwidth: link_bandwidth and network_bandwidth scale, latencies stay.
- No other group uses the same links at the same time. Each device has its own network adapter: if every rank of a node is in
  a different group with ranks of other nodes, each group has the adapter of one device per node.
- A group that is spread unevenly is as fast as the node with the fewest of its ranks.
- All collectives are rings, except all-reduces, which are trees where that is faster. NCCL has better algorithms for small
  all-gathers with one device per node. A broadcast takes as long as an all-gather; an all-to-all has the latency of one.
"""

from __future__ import annotations

import math
from collections import Counter

from meshrunner.runner.config.hardware import GPU

GB, MB = 1e9, 1e6
LINK_BANDWIDTH = 450.0
"""GB/s of the H100, to which NODE_BANDWIDTH belongs."""
NODE_BANDWIDTH = ((2, 537.0), (4, 434.0), (8, 394.0))
"""(devices, GB/s): bytes of the whole buffer per second in all-gathers and reduce-scatters."""
NODE_LATENCY = ((2, 8e-6), (4, 17e-6), (8, 30e-6))
"""(devices, seconds)."""
RAMP = ((8 * MB, 0.68), (16 * MB, 0.79), (32 * MB, 0.87))
"""(bytes per rank, share of the network's bandwidth that is reached)."""
STEP_IN_NODE, STEP_ACROSS = 3.4e-6, 14e-6
"""Seconds of a ring's step to a device of the same node and of another node: together 38 microseconds per node of 8 devices."""
TREE = 0.7
"""Bandwidth of a tree relative to a ring."""


def seconds(name: str, ranks: tuple[int, ...], nbytes: int, hardware: GPU, workers: int) -> float:
    """
    Return the time of one collective; 0 for a group of one rank.

    The time never falls as `nbytes` grows, nor as the group spreads evenly over more nodes.

    Args:
        name: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        ranks: of the group, numbered node by node.
        nbytes: of the whole buffer, see `trace_events.Collective`.
        workers: processes per node.
    """
    n = len(ranks)
    if n < 2:
        return 0.0
    nodes = Counter(rank // workers for rank in ranks)
    latency = _interpolate(NODE_LATENCY, n)
    transfer = nbytes / (_interpolate(NODE_BANDWIDTH, n) * GB * hardware.link_bandwidth / LINK_BANDWIDTH)
    if len(nodes) > 1:
        latency = STEP_ACROSS * len(nodes) + STEP_IN_NODE * (n - len(nodes))
        per_adapter = _sent(name, nbytes, n, fewest=min(nodes.values()))
        ramp = _interpolate(RAMP, nbytes / n)
        # Data that crosses the network also passes through the nodes.
        transfer = max(transfer, per_adapter / (hardware.network_bandwidth * GB * ramp))
    if name == "all_reduce":
        return _all_reduce(latency, transfer, max(nodes.values()), len(nodes))
    return latency + transfer


def _sent(name: str, nbytes: int, n: int, fewest: int) -> float:
    """Return the bytes that leave a node through each adapter of the group."""
    if name == "all_to_all":
        return nbytes * (n - fewest) / n
    # A ring carries all but a rank's own part from node to node, split over the adapters of the group's ranks on a node.
    return nbytes * (n - 1) / n / fewest


def _all_reduce(latency: float, transfer: float, most: int, nodes: int) -> float:
    """Return the time of a reduce-scatter and an all-gather, or of a tree up and down; a node's switch adds one latency."""
    if nodes == 1:
        return latency + 2 * transfer
    # The latency within a node already covers both directions.
    up_and_down = (_interpolate(NODE_LATENCY, most) if most > 1 else 0.0) + 2 * STEP_ACROSS * math.log2(nodes)
    return min(2 * (latency + transfer), up_and_down + 2 * transfer / TREE)


def _interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Interpolate linearly between points, and hold the value constant outside."""
    x0, y0 = points[0]
    if x <= x0:
        return y0
    for x1, y1 in points[1:]:
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        x0, y0 = x1, y1
    return y0

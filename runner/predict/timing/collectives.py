"""
How long a collective takes among devices of one node or several.

The constants are those of H100s, 8 a node, NVSwitch within and a network adapter of 400 Gbit/s per device between nodes:
results of nccl-tests and NCCL's tuning tables, as fitted in meta-pytorch/autoparallel (`cost_models/nccl_cost_model.py`).
Not measured but assumed:

- other hardware differs in its bandwidths alone: link_bandwidth and network_bandwidth scale, latencies stay;
- no other group uses the same links at the same time. Each device has a network adapter of its own: where every rank of a
  node is in a group of its own with ranks of other nodes, each group has the adapter of one device per node;
- a group that is spread unevenly is as fast as the node with the fewest of its ranks;
- all are rings but all-reduces, which are trees where that is faster. NCCL has better algorithms for small all-gathers of
  one device per node. A broadcast takes as long as an all-gather, an all-to-all has the latency of one.
"""

from __future__ import annotations

import math
from collections import Counter

from meshrunner.runner.config.hardware import GPU

GB, MB = 1e9, 1e6
LINK_BANDWIDTH = 450.0
"""GB/s, of the device that the constants within a node are of."""
NODE_BANDWIDTH = ((2, 537.0), (4, 434.0), (8, 394.0))
"""Of all-gathers and reduce-scatters by devices, GB/s: the whole's bytes per second."""
NODE_LATENCY = ((2, 8e-6), (4, 17e-6), (8, 30e-6))
RAMP = ((8 * MB, 0.68), (16 * MB, 0.79), (32 * MB, 0.87))
"""Share of the network's bandwidth that is reached, by bytes per rank."""
STEP_IN_NODE, STEP_ACROSS = 3.4e-6, 14e-6
"""Latency of a ring's step to a device of the same node, and of another; together 38 microseconds a node of 8 devices."""
TREE = 0.7
"""Bandwidth of a tree as a share of a ring's."""


def seconds(name: str, ranks: tuple[int, ...], nbytes: int, hardware: GPU, workers: int) -> float:
    """
    Time of one collective; 0 for a group of one rank.

    It does not fall with `nbytes`, nor for the same ranks on more nodes if each node has as many of them.

    Args:
        name: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        ranks: the group's, numbered node by node.
        nbytes: of the whole, as in `log.Collective`.
        workers: on a node.
    """
    n = len(ranks)
    if n < 2:
        return 0.0
    nodes = Counter(rank // workers for rank in ranks)
    latency = between(NODE_LATENCY, n)
    transfer = nbytes / (between(NODE_BANDWIDTH, n) * GB * hardware.link_bandwidth / LINK_BANDWIDTH)
    if len(nodes) > 1:
        latency = STEP_ACROSS * len(nodes) + STEP_IN_NODE * (n - len(nodes))
        per_adapter = _sent(name, nbytes, n, fewest=min(nodes.values()))
        ramp = between(RAMP, nbytes / n)
        # What crosses the network passes through the nodes, too.
        transfer = max(transfer, per_adapter / (hardware.network_bandwidth * GB * ramp))
    if name == "all_reduce":
        return _all_reduce(latency, transfer, max(nodes.values()), len(nodes))
    return latency + transfer


def _sent(name: str, nbytes: int, n: int, fewest: int) -> float:
    """Bytes that leave a node through each adapter of the group."""
    if name == "all_to_all":
        return nbytes * (n - fewest) / n
    # A ring carries all but a rank's own part from node to node, split over the adapters of the group's ranks there.
    return nbytes * (n - 1) / n / fewest


def _all_reduce(latency: float, transfer: float, most: int, nodes: int) -> float:
    """A reduce-scatter and an all-gather, or a tree, up and down; within a node the switch has one latency."""
    if nodes == 1:
        return latency + 2 * transfer
    # An all-reduce within a node has the latency of both ways.
    up_and_down = (between(NODE_LATENCY, most) if most > 1 else 0.0) + 2 * STEP_ACROSS * math.log2(nodes)
    return min(2 * (latency + transfer), up_and_down + 2 * transfer / TREE)


def between(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Linear between the points, constant outside."""
    x0, y0 = points[0]
    if x <= x0:
        return y0
    for x1, y1 in points[1:]:
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        x0, y0 = x1, y1
    return y0

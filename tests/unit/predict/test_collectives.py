"""How long collectives take: published figures, and what must hold for any bytes and ranks."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from meshrunner.runner.config.hardware import GPU, known_gpus
from meshrunner.runner.predict.timing.rates import GPURates

H100 = next(gpu for gpu in known_gpus() if gpu.name == "H100 96GB")
NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
GB = 10**9


def seconds(name: str, ranks: tuple[int, ...], nbytes: int, hardware: GPU, workers: int | None = None) -> float:
    """By default with as many workers on a node as it has devices."""
    return GPURates(hardware, "tf32", workers or hardware.devices_per_node).collective_s(name, ranks, nbytes)


def group(nodes: int, per_node: int, devices: int = 8) -> tuple[int, ...]:
    return tuple(node * devices + i for node in range(nodes) for i in range(per_node))


def bandwidth(name: str, ranks: tuple[int, ...], hardware: GPU = H100) -> float:
    """GB/s of the whole, for large messages and latency apart."""
    return 10 / (seconds(name, ranks, 20 * GB, hardware) - seconds(name, ranks, 10 * GB, hardware))


@pytest.mark.parametrize(("n", "gb_per_s", "latency"), [(2, 537, 8e-6), (4, 434, 17e-6), (8, 394, 30e-6)])
def test_within_a_node(n: int, gb_per_s: float, latency: float) -> None:
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bandwidth(name, group(1, n)) == pytest.approx(gb_per_s)
        assert seconds(name, group(1, n), 0, H100) == pytest.approx(latency)
    assert bandwidth("all_reduce", group(1, n)) == pytest.approx(gb_per_s / 2)
    slow = H100.model_copy(update={"link_bandwidth": 45.0})
    assert bandwidth("all_gather", group(1, n), slow) == pytest.approx(gb_per_s / 10)


@pytest.mark.parametrize(
    ("name", "nodes", "per_node", "gb_per_s"),
    [
        # Measured with nccl-tests (meta-pytorch/autoparallel, h100_nvswitch_roce_400g.py).
        ("reduce_scatter", 2, 8, 377),
        ("reduce_scatter", 4, 8, 369),
        ("reduce_scatter", 8, 8, 358),
        ("all_gather", 4, 8, 328),
        ("all_gather", 4, 4, 199),
        ("all_gather", 8, 2, 99),
        ("all_gather", 8, 1, 48.3),
        ("reduce_scatter", 32, 1, 45.7),
        ("all_reduce", 8, 1, 25.9),
        ("all_reduce", 2, 8, 193),
        ("all_reduce", 8, 4, 97.9),
        ("all_to_all", 2, 8, 82.5),
        ("all_to_all", 8, 8, 46.8),
        ("all_to_all", 8, 1, 46.0),
    ],
)
def test_across_nodes(name: str, nodes: int, per_node: int, gb_per_s: float) -> None:
    assert bandwidth(name, group(nodes, per_node), H100) == pytest.approx(gb_per_s, rel=0.16)


def test_a_ring_across_nodes() -> None:
    """Over 4 nodes of 8, 32 MB a rank, seven eighths of 8 x 50 GB/s; each node adds 37.8 microseconds."""
    whole = 32 * 32_000_000
    transfer = whole * 31 / 32 / (0.87 * 400e9)
    assert seconds("all_gather", group(4, 8), whole, H100) == pytest.approx(transfer + 4 * 37.8e-6)
    assert seconds("all_gather", group(4, 8), 32, H100) == pytest.approx(4 * 38e-6, rel=0.01)
    for each in (1_000_000, 8_000_000):
        transfer = 31 * each / (0.68 * 400e9)
        assert seconds("all_gather", group(4, 8), 32 * each, H100) == pytest.approx(transfer + 4 * 37.8e-6)
    assert seconds("all_gather", group(4, 1), 4, H100) == pytest.approx(4 * 14e-6, rel=0.01)


def test_one_rank_of_each_node() -> None:
    """Replicas of a hybrid layout: each device has a network adapter of its own, whatever its place in the node."""
    replicas = [tuple(range(place, 64, 8)) for place in range(8)]
    assert len({seconds("all_reduce", ranks, GB, H100) for ranks in replicas}) == 1
    assert bandwidth("all_gather", replicas[3]) == pytest.approx(0.87 * 50 * 8 / 7)
    assert bandwidth("all_gather", (0, 2, 4, 6)) == bandwidth("all_gather", (0, 1, 2, 3))
    faster = H100.model_copy(update={"network_bandwidth": 100.0})
    assert bandwidth("all_gather", replicas[3], faster) == pytest.approx(2 * bandwidth("all_gather", replicas[3]))


def test_the_node_with_the_fewest_ranks_is_the_slowest() -> None:
    assert bandwidth("all_gather", tuple(range(9))) == pytest.approx(0.87 * 50 * 9 / 8)
    assert bandwidth("all_gather", tuple(range(12))) == pytest.approx(0.87 * 200 * 12 / 11)


def test_devices_per_node_come_from_the_hardware() -> None:
    four = H100.model_copy(update={"devices_per_node": 4})
    assert bandwidth("all_gather", tuple(range(8)), four) == pytest.approx(0.87 * 200 * 8 / 7)


def test_a_scalar_is_reduced_in_a_tree() -> None:
    """Otherwise every gradient norm on 4,096 devices would cost 40 ms."""
    assert seconds("all_reduce", group(512, 8), 4, H100) == pytest.approx(30e-6 + 2 * 9 * 14e-6, rel=0.01)


def test_the_network_is_never_faster_than_the_node() -> None:
    network = H100.model_copy(update={"network_bandwidth": 1000.0})
    assert bandwidth("all_gather", group(4, 8), network) == pytest.approx(394)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_costs_nothing(name: str) -> None:
    assert seconds(name, (5,), GB, H100) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hardware", known_gpus(), ids=lambda gpu: gpu.name)
def test_more_never_takes_less_time(name: str, hardware: GPU) -> None:
    random = Random(0)
    devices = hardware.devices_per_node
    for _ in range(150):
        nbytes = int(10 ** random.uniform(0, 11))
        more = nbytes + int(10 ** random.uniform(0, 11))
        nodes, per_node = 2 ** random.randrange(8), 2 ** random.randrange(devices.bit_length())
        ranks = group(nodes, per_node, devices)
        found = seconds(name, ranks, nbytes, hardware)
        assert found <= seconds(name, ranks, more, hardware)
        assert found <= seconds(name, group(nodes + random.randrange(1, 9), per_node, devices), nbytes, hardware)
        if per_node > 1:  # the same ranks on twice as many nodes
            assert found <= seconds(name, group(2 * nodes, per_node // 2, devices), nbytes, hardware)
        uneven = tuple(random.sample(range(8 * devices), random.randrange(1, 8 * devices)))
        assert seconds(name, uneven, nbytes, hardware) <= seconds(name, uneven, more, hardware)


def test_more_devices_never_gather_faster() -> None:
    times = [seconds("all_gather", tuple(range(n)), 400_000_000, H100) for n in (8, 16, 128, 1024, 4096)]
    assert all(a < b for a, b in pairwise(times))
    assert times[0] == pytest.approx(1.05e-3, rel=0.01) and times[-1] == pytest.approx(21e-3, rel=0.05)


def test_nodes_have_as_many_ranks_as_workers() -> None:
    """Whatever number of devices a node of that hardware has."""
    on_eight, on_two, on_one = (seconds("all_gather", tuple(range(8)), GB, H100, workers) for workers in (1, 4, 8))
    assert on_one < on_two < on_eight / 2
    assert on_one == seconds("all_gather", tuple(range(8)), GB, H100, 16)

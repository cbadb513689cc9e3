"""Over which interface gloo connects the nodes of a run, on machines described by addresses and routes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrunner.runner.config.devices import NodeDevices
from meshrunner.runner.launch import workers
from meshrunner.runner.process import network
from meshrunner.runner.process.network import allows, gloo_interface, interfaces, sources
from meshrunner.runner.process.worker_context import Node, SharedIntegers
from tests.composed import experiment

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.2", "10.0.0.3"],
    "ib0": ["10.9.0.2", "fd00::2"],
}
ROUTES = {
    "node1": ["10.0.0.3"],
    "node1-ib": ["fd00::2"],
    "this-host": ["127.0.0.1"],  # its name is 127.0.1.1
    "unknown": [],
    network.OUTSIDE[0]: ["10.0.0.2"],
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def routed(host: str) -> Iterator[str]:
        yield from ROUTES.get(host, [])

    monkeypatch.setattr(network, "interfaces", lambda: ADDRESSES)
    monkeypatch.setattr(network, "sources", routed)


@pytest.mark.parametrize(
    ("wanted", "master", "chosen"),
    [
        ("", "node1", "eth0"),
        ("", "node1-ib", "ib0"),
        ("", "this-host", "eth0"),  # that of the default route, not the loopback
        ("", "unknown", "eth0"),
        ("ib", "node1", "ib0"),
        ("=ib0,eth0", "node1", "eth0"),
        ("=ib", "node1", None),
        ("^docker,eth", "node1", "ib0"),
        ("^eth0", "node1", "docker0"),
        ("lo", "this-host", "lo"),
        ("enp", "node1", None),
    ],
)
def test_which_interface(wanted: str, master: str, chosen: str | None) -> None:
    assert gloo_interface({"NCCL_SOCKET_IFNAME": wanted} if wanted else {}, master) == chosen


def test_without_a_default_route_it_is_one_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTES, network.OUTSIDE[0], [])
    assert gloo_interface({}, "this-host") == "docker0"
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"]})
    assert gloo_interface({}, "this-host") is None


def test_what_nccl_allows() -> None:
    assert allows("eth,ib", "ib1")
    assert allows("=eth0,ib0", "ib0")
    assert not allows("=eth0", "eth01")
    assert allows("^=docker0", "docker1")
    assert not allows("^docker", "docker0")
    assert not allows("^docker", "lo")


@pytest.mark.parametrize(
    ("nodes", "given", "found"),
    [
        (1, {}, None),
        (2, {}, "eth0"),
        (2, {"NCCL_SOCKET_IFNAME": "ib"}, "ib0"),
        (2, {"GLOO_SOCKET_IFNAME": "ib1", "NCCL_SOCKET_IFNAME": "ib"}, "ib1"),
    ],
)
def test_workers_of_several_nodes_are_told_unless_the_user_has(
    nodes: int, given: dict[str, str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, ...]] = []
    fake: Any = SimpleNamespace(Process=lambda target, args: started.append(args))
    monkeypatch.setattr(workers.forkserver, "context", fake)
    own = experiment(*(f"+launch.env.{name}={value}" for name, value in given.items()))
    attempt: Any = SimpleNamespace(
        run_dir=tmp_path, experiment=own, devices=NodeDevices("cpu", 1, 1), number=1, first_rank=0,
        peers=SimpleNamespace(node=Node(0, nodes, "node1", 10012, "")), preemption=SimpleNamespace(shared=None),
    )  # fmt: skip
    workers._create_processes(attempt, SharedIntegers(1), SharedIntegers(1))
    assert [args[1].get("GLOO_SOCKET_IFNAME") for args in started] == [found]


def test_this_machine_has_addresses() -> None:
    found = interfaces()
    assert "127.0.0.1" in found["lo"]
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in sources("localhost")
    assert list(sources("no such host.invalid")) == []

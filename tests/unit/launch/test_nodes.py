"""What the nodes of a run tell each other, and how they agree on what has happened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.config.devices import NodeDevices
from meshrunner.runner.launch import execute, nodes
from meshrunner.runner.launch.nodes import Peers, only_this_node, this_node
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.process.worker_context import Node
from meshrunner.runner.rundir.files import write_json
from meshrunner.runner.rundir.states import Status, owner_is_alive, this_process

JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "10012",
}
VICTIM = Outcome("failed", "rank 0: Connection closed by peer", 0, collateral=True)
CAUSE = Outcome("oom", "rank 3: no memory", 3, exit_code=1)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "POLL_S", 0.01)
    monkeypatch.setattr(nodes, "NODE_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(nodes, "NODE_LOST_S", 0.5)
    monkeypatch.setattr(nodes, "REPORT_S", 0.3)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Peers, Peers]]:
    (tmp_path / "logs").mkdir()
    with (
        Peers(tmp_path, Node(0, 2, "node1", 10012, "12.0.0")) as head,
        Peers(tmp_path, Node(1, 2, "node1", 10012, "12.0.0")) as other,
    ):
        yield head, other


def test_a_run_on_one_node_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in (JOB | {"SLURM_STEP_NUM_NODES": "1"}).items():
        monkeypatch.setenv(key, value)
    node = this_node(1)
    assert (node.rank, node.count, node.host, node.port) == (0, 1, "localhost", 0)
    with Peers(tmp_path, node) as peers:
        assert not peers.failed_elsewhere()
        assert peers.agree_on_outcome(VICTIM) is VICTIM
    assert list(tmp_path.iterdir()) == []


def test_slurm_says_which_node_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Incompatible, match="submit"):
        this_node(2)
    for key, value in JOB.items():
        monkeypatch.setenv(key, value)
    assert this_node(2) == Node(1, 2, "node1", 10012, "12.0.0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert this_node(2).rendezvous == "12.3.0"
    with pytest.raises(Incompatible, match=r"launch.nodes\(4\) needs 4 nodes with one task each, .* 2 tasks on 2 node"):
        this_node(4)
    with pytest.raises(Incompatible, match=r"launch.nodes\(1\) needs 1 node with"):
        this_node(1)  # one of the two would find the run busy, and srun end the other for it
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(Incompatible, match="4 tasks on 2 nodes"):
        this_node(2)


def test_what_is_not_placed_yet_runs_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in JOB.items():
        monkeypatch.setenv(key, value)
    only_this_node(1)
    with pytest.raises(Incompatible, match="submit"):
        only_this_node(2)


def test_the_cause_is_the_outcome_on_every_node(pair: tuple[Peers, Peers]) -> None:
    head, other = pair
    assert not head.failed_elsewhere()
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(head.agree_on_outcome(VICTIM)))
    thread.start()
    assert other.agree_on_outcome(CAUSE) == CAUSE
    thread.join()
    assert found == [CAUSE]
    assert head.failed_elsewhere()
    other_again = other.agree_on_outcome(CAUSE)
    assert other_again == CAUSE


def test_a_node_without_a_sign_of_life_is_lost(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    gone = {"rendezvous": "12.0.0", "host": "node2", "beat": 5}
    write_json(tmp_path / "logs" / "node1.json", gone)
    with Peers(tmp_path, Node(0, 2, "node1", 10012, "12.0.0")) as head:
        assert not head.failed_elsewhere()
        outcome = head.agree_on_outcome(VICTIM)
        assert head.failed_elsewhere()
    assert outcome.state == "preempted"
    assert "no heartbeat from node2" in outcome.reason


def test_what_an_earlier_start_of_the_job_left_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    write_json(tmp_path / "logs" / "node1.json", {"rendezvous": "12.0.0", "outcome": {"state": "failed"}})
    with Peers(tmp_path, Node(0, 2, "node1", 10012, "12.1.0")) as head:
        assert not head.failed_elsewhere()


def test_what_is_wrong_on_one_node_is_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else srun would end the first node's launcher for it, and the job would be started again."""

    def no_devices(_: object) -> NodeDevices:
        raise ConfigError("hardware: this node has no GPU")

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(execute, "node_devices", no_devices)
    monkeypatch.setattr(execute, "prepare_data", lambda *_: nullcontext())
    experiment: Any = SimpleNamespace(checkpoint=SimpleNamespace(saves=False))
    with Peers(tmp_path, Node(0, 2, "node1", 10012, "12.0.0")) as head:
        monkeypatch.setattr(Peers, "wait_for_first_node", lambda _: None)
        with pytest.raises(ConfigError):
            execute._execute_other_node(tmp_path, experiment, Node(1, 2, "node1", 10012, "12.0.0"))
        assert head.failed_elsewhere()
        outcome = head.agree_on_outcome(VICTIM)
    assert (outcome.state, outcome.reason) == ("failed", "hardware: this node has no GPU")


def test_a_victim_that_nobody_explains_keeps_its_word(pair: tuple[Peers, Peers]) -> None:
    head, other = pair
    other.publish(outcome={"state": "failed", "reason": "", "rank": 2, "collateral": True, "time": 0.0, "exit_code": 1})
    assert head.agree_on_outcome(VICTIM) == VICTIM


def test_the_others_wait_for_the_first_node(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    other = Peers(tmp_path, Node(1, 2, "node1", 10012, "12.0.0"))
    other.wait_for_first_node()  # it never came: not for ever
    with Peers(tmp_path, Node(0, 2, "node1", 10012, "12.0.0")):
        thread = threading.Thread(target=other.wait_for_first_node)
        thread.start()
        thread.join(0.7)
        assert thread.is_alive()
    thread.join(1)
    assert not thread.is_alive()


def test_a_job_that_was_started_again_has_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    status = Status(state="running", owner=this_process())
    assert owner_is_alive(status)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not owner_is_alive(status)
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    assert owner_is_alive(status)

"""Find this node's rank among a run's nodes, and exchange heartbeats and outcomes between nodes through the run directory."""

import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.process.signals import job_start_id
from meshrunner.runner.process.worker_context import Node
from meshrunner.runner.rundir import JsonFile, heartbeat
from meshrunner.runner.rundir.files import node_file
from meshrunner.runner.slurm.steps import allocated_nodes

NODE_HEARTBEAT_S = 3.0
NODE_LOST_S = 30.0
"""Number of seconds without a heartbeat after which a node is considered lost."""
REPORT_S = 5.0
"""Seconds to wait for the outcomes of the other nodes after a failure on this node."""
POLL_S = 0.2


def this_node(nodes: int) -> Node:
    """Return this node's rank and rendezvous in a run on `nodes` nodes. If `nodes` > 1, read both from the environment."""
    environment = os.environ
    here = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if nodes == 1 and (here == 1 or "MASTER_PORT" not in environment):  # without a port, each task executes its own run
        return Node(0, 1, "localhost", 0, "")
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        only_this_node(nodes)
    tasks = environment.get("SLURM_STEP_NUM_TASKS", str(here))
    if here != nodes or tasks != str(here):
        raise Incompatible(
            f"launch.nodes({nodes}) needs {nodes} node{'s' * (nodes > 1)} with one task each, "
            f"but SLURM started {tasks} tasks on {here} node{'s' * (here > 1)}"
        )
    if not environment.get("MASTER_ADDR") or not environment.get("MASTER_PORT", "").isdigit():
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT must be the host and port of the rendezvous; slurm/run.sbatch sets them"
        )
    return Node(
        rank=int(environment["SLURM_NODEID"]),
        count=nodes,
        host=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        rendezvous=f"{job_start_id()}.{environment.get('SLURM_STEP_ID', '0')}",
    )


def only_this_node(nodes: int) -> None:
    """Raise Incompatible if a run needs several nodes. Commands that start workers only on this machine use this check."""
    if nodes > 1:
        raise Incompatible(
            f"launch.nodes({nodes}): this command starts workers on one machine only. Use `meshrunner submit` to run on several "
            "nodes with SLURM, or see slurm/run.sbatch"
        )


def workers_of_sweep(experiment: Experiment) -> int:
    """Return the workers per node of a run in a sweep. Raise Incompatible if the run needs more nodes than are allocated."""
    if experiment.launch.nodes_used > allocated_nodes():
        only_this_node(experiment.launch.nodes_used)
    return node_devices(experiment).workers


def workers_here(experiment: Experiment) -> int:
    """Return the number of workers that a run starts on this machine. Raise Incompatible if the run needs several nodes."""
    only_this_node(experiment.launch.nodes_used)
    return node_devices(experiment).workers


class NodeRecord(JsonFile):
    """The content of `logs/node<N>.json` in a run on several nodes: node N's heartbeat and the outcome of its workers."""

    rendezvous: str | None = None
    """Id of the rendezvous. Each start of the SLURM job has a new id. Files with the id of an earlier start are ignored."""
    host: str | None = None
    beat: int = 0
    outcome: Outcome | None = None
    gone: bool = False
    """Whether the node's launcher has finished."""


class Peers:
    """A context manager that watches the other nodes of a run and sends this node's heartbeats from a thread."""

    def __init__(self, run_dir: Path, node: Node) -> None:
        self.run_dir, self.node = run_dir, node
        self.record = NodeRecord(rendezvous=node.rendezvous, host=socket.gethostname(), beat=0)
        self.others = [rank for rank in range(node.count) if rank != node.rank]
        self.seen: dict[int, tuple[NodeRecord, float]] = {}
        self.lock, self.beating = threading.Lock(), ExitStack()

    def __enter__(self) -> Self:
        if self.others:
            self.publish()
            self.beating.enter_context(heartbeat(lambda: self.publish(beat=self.record.beat + 1), NODE_HEARTBEAT_S))
        return self

    def __exit__(self, *_: object) -> None:
        self.beating.close()
        self.publish(gone=True)

    def publish(self, **changes: Any) -> None:
        """Write `changes` into this node's file, which the other nodes read."""
        if self.others:
            with self.lock, suppress(OSError):  # on a full disk the other nodes consider this node lost and end the run
                self.record |= changes
                self.record.write(node_file(self.run_dir, self.node.rank))

    def failed_elsewhere(self) -> bool:
        """Return whether another node is lost or has published an outcome other than `completed`."""
        self._read_peers()
        return any(each.state != "completed" for each in self._outcomes()) or bool(self._lost_nodes())

    def agree_on_outcome(self, own: Outcome) -> Outcome:
        """Publish this node's outcome. After a failure, wait for the other nodes' outcomes and return the earliest failure."""
        if not self.others:
            return own
        mine = replace(own, time=time.time())
        self.publish(outcome=mine)
        if own.state == "completed":
            return own
        # If a lost node may have caused the failure, wait longer: a node counts as lost only after NODE_LOST_S seconds.
        deadline = time.monotonic() + (NODE_LOST_S + REPORT_S if own.collateral else REPORT_S)
        while len(self._outcomes()) + len(self._lost_nodes()) < len(self.others) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._read_peers()
        causes = [each for each in (mine, *self._outcomes()) if each.state != "completed" and not each.collateral]
        if causes:
            return min(causes, key=lambda each: each.time)
        if lost := self._lost_nodes():
            names = ", ".join(self.seen[rank][0].host or str(rank) for rank in lost)
            return Outcome("preempted", f"no heartbeat from {names} for {NODE_LOST_S:g} s")
        return own

    def wait_for_first_node(self) -> None:
        """Wait until the first node is finished or lost: if this task exited earlier, srun would kill the first node's task."""
        self._read_peers()
        deadline = time.monotonic() + NODE_LOST_S  # the first node may never have started
        while not self.seen[0][0].gone if 0 in self.seen else time.monotonic() < deadline:
            if 0 in self._lost_nodes(include_ended=True):
                return
            time.sleep(POLL_S)
            self._read_peers()

    def _read_peers(self) -> None:
        now = time.monotonic()
        for rank in self.others:
            found = NodeRecord.read(node_file(self.run_dir, rank))
            known = self.seen.get(rank)
            if found.rendezvous == self.node.rendezvous and (known is None or known[0] != found):
                self.seen[rank] = found, now

    def _outcomes(self) -> list[Outcome]:
        return [outcome for found, _ in self.seen.values() if (outcome := found.outcome) is not None]

    def _lost_nodes(self, *, include_ended: bool = False) -> list[int]:
        """Return the ranks of lost nodes. Ignore nodes that have published an outcome, unless `include_ended` is true."""
        now = time.monotonic()
        return [
            rank
            for rank, (found, when) in self.seen.items()
            if now - when > NODE_LOST_S and (include_ended or found.outcome is None)
        ]

"""The nodes of one run: the place of this node, and what the nodes exchange through the run directory."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.process.signals import job_start_id
from meshrunner.runner.process.worker_context import Node
from meshrunner.runner.rundir import NodeOutcome, NodeRecord
from meshrunner.runner.rundir.files import node_file

NODE_HEARTBEAT_S = 3.0
NODE_LOST_S = 30.0
"""Seconds without a heartbeat after which a node is lost."""
REPORT_S = 5.0
"""Seconds that the other nodes have after a failure to publish their outcome."""
POLL_S = 0.2


def this_node(nodes: int) -> Node:
    """
    Return the place of this process among `launch.nodes` nodes: alone, or a task of the srun in slurm/run.sbatch.

    Raises:
        Incompatible: SLURM has started another number of nodes or tasks.
        ConfigError: the address of the rendezvous is missing.
    """
    environment = os.environ
    here = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if nodes == 1 and (here == 1 or "MASTER_PORT" not in environment):  # without it: a job step of separate runs
        return Node(0, 1, "localhost", 0, "")
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        only_this_node(nodes)
    if here != nodes or environment.get("SLURM_STEP_NUM_TASKS", str(here)) != str(here):
        tasks = environment.get("SLURM_STEP_NUM_TASKS")
        raise Incompatible(
            f"launch.nodes({nodes}) needs {nodes} node{'s' * (nodes > 1)} with one task each, "
            f"but SLURM has started {tasks} tasks on {here}"
        )
    if not environment.get("MASTER_ADDR") or not environment.get("MASTER_PORT", "").isdigit():
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT must be the address of the rendezvous; slurm/run.sbatch sets them"
        )
    return Node(
        rank=int(environment["SLURM_NODEID"]),
        count=nodes,
        host=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        rendezvous=f"{job_start_id()}.{environment.get('SLURM_STEP_ID', '0')}",
    )


def only_this_node(nodes: int) -> None:
    """Raise Incompatible when a run that is not placed yet needs several nodes: each of them would place it."""
    if nodes > 1:
        raise Incompatible(
            f"launch.nodes({nodes}): this command starts workers on one machine only. `meshrunner submit` has SLURM start "
            "the run on several, as slurm/run.sbatch does"
        )


class Peers:
    """
    The other nodes of a run: `logs/node<N>.json` holds the heartbeat of a node and the outcome of its workers.

    A context manager: inside, this node sends heartbeats. A run on a single node writes nothing.
    """

    def __init__(self, run_dir: Path, node: Node) -> None:
        self.run_dir, self.node = run_dir, node
        self.record = NodeRecord(rendezvous=node.rendezvous, host=socket.gethostname(), pid=os.getpid(), beat=0)
        self.others = [rank for rank in range(node.count) if rank != node.rank]
        self.seen: dict[int, tuple[NodeRecord, float]] = {}
        self.lock, self.done = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._send_heartbeats, daemon=True, name="node heartbeat")

    def __enter__(self) -> Peers:
        if self.others:
            self._write()
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.others:
            self.done.set()
            self.thread.join()
            self._write(gone=True)

    def publish(self, **changes: Any) -> None:
        """Change this node's record, which the others read."""
        if self.others:
            self._write(**changes)

    def failed_elsewhere(self) -> bool:
        """Return whether the workers of another node have failed, or it is lost."""
        self._read_peers()
        return any(each.state != "completed" for each in self._outcomes()) or bool(self._lost_nodes())

    def agree_on_outcome(self, own: Outcome) -> Outcome:
        """Publish the outcome of this node's workers, wait for the others', and return the run's: that of the cause."""
        if not self.others:
            return own
        mine = NodeOutcome.model_validate(asdict(own) | {"time": time.time()})
        self._write(outcome=mine.as_json())
        if own.state == "completed":
            return own
        # A victim waits for its cause; longest if the cause is a lost node, which publishes nothing.
        deadline = time.monotonic() + (NODE_LOST_S + REPORT_S if own.collateral else REPORT_S)
        while any(not self._has_ended(rank) for rank in self.others if rank not in self._lost_nodes()):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            self._read_peers()
        causes = [each for each in (mine, *self._outcomes()) if each.state != "completed" and not each.collateral]
        if causes:
            first = min(causes, key=lambda each: each.time)
            return Outcome(first.state, first.reason, first.rank, first.exit_code)
        if lost := self._lost_nodes():
            names = ", ".join(self.seen[rank][0].host or str(rank) for rank in lost)
            return Outcome("preempted", f"{names}: no heartbeat for {NODE_LOST_S:g} s")
        return own

    def wait_for_first_node(self) -> None:
        """Wait until the first node has finished or is lost: srun kills the tasks that outlive the first to end."""
        self._read_peers()
        deadline = time.monotonic() + NODE_LOST_S  # it may never have started
        while not self.seen[0][0].gone if 0 in self.seen else time.monotonic() < deadline:
            if 0 in self._lost_nodes(include_ended=True):
                return
            time.sleep(POLL_S)
            self._read_peers()

    def _send_heartbeats(self) -> None:
        while not self.done.wait(NODE_HEARTBEAT_S):
            self._write(beat=self.record.beat + 1)

    def _write(self, **changes: Any) -> None:
        with self.lock, suppress(OSError):  # on a full disk this node becomes lost, which ends the run, too
            self.record |= changes
            self.record.write(node_file(self.run_dir, self.node.rank))

    def _read_peers(self) -> None:
        now = time.monotonic()
        for rank in self.others:
            found = NodeRecord.read(node_file(self.run_dir, rank))
            known = self.seen.get(rank)
            if found.rendezvous == self.node.rendezvous and (known is None or known[0] != found):
                self.seen[rank] = found, now

    def _has_ended(self, rank: int) -> bool:
        return rank in self.seen and self.seen[rank][0].outcome is not None

    def _outcomes(self) -> list[NodeOutcome]:
        """Return the outcomes that other nodes have published."""
        return [outcome for found, _ in self.seen.values() if (outcome := found.outcome) is not None]

    def _lost_nodes(self, *, include_ended: bool = False) -> list[int]:
        """Nodes whose heartbeats have stopped. include_ended: those that had published their outcome, too."""
        now = time.monotonic()
        return [
            rank
            for rank, (found, when) in self.seen.items()
            if now - when > NODE_LOST_S and (include_ended or found.outcome is None)
        ]

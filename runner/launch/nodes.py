"""The machines of one run: which of them this is, and what they tell each other in the run directory."""

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
from meshrunner.runner.process.signals import start_of_job
from meshrunner.runner.process.worker_context import Node
from meshrunner.runner.rundir.files import node_file, read_json, write_json

BEAT_S = 3.0
LOST_S = 30.0
"""Seconds without a sign of life after which a node counts as gone."""
SPEAK_S = 5.0
"""Seconds that the others have after the first failure to say what they saw."""
POLL_S = 0.2


def this_node(nodes: int) -> Node:
    """
    This machine among the `launch.nodes` of a run: the only one, or a task of the srun in slurm/run.sbatch.

    Raises:
        Incompatible: SLURM has started fewer or more nodes than the run has.
        ConfigError: the address at which the workers meet is missing.
    """
    environment = os.environ
    here = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if nodes == 1 and (here == 1 or "MASTER_PORT" not in environment):  # without it: a step of separate runs
        return Node(0, 1, "localhost", 0, "")
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        only_this_node(nodes)
    if here != nodes or environment.get("SLURM_STEP_NUM_TASKS", str(here)) != str(here):
        tasks = environment.get("SLURM_STEP_NUM_TASKS")
        raise Incompatible(
            f"launch.nodes({nodes}) wants {nodes} node{'s' * (nodes > 1)} with one task each, "
            f"but SLURM has started {tasks} tasks on {here}"
        )
    if not environment.get("MASTER_ADDR") or not environment.get("MASTER_PORT", "").isdigit():
        raise ConfigError("MASTER_ADDR and MASTER_PORT say where the workers meet; slurm/run.sbatch sets them")
    return Node(
        rank=int(environment["SLURM_NODEID"]),
        count=nodes,
        host=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        rendezvous=f"{start_of_job()}.{environment.get('SLURM_STEP_ID', '0')}",
    )


def only_this_node(nodes: int) -> None:
    """Raise Incompatible if a run has several nodes, where a command executes it on this one alone."""
    if nodes > 1:
        raise Incompatible(
            f"launch.nodes({nodes}): this command starts workers on one machine only. `meshrunner submit` has SLURM start "
            "the run on several; slurm/run.sbatch shows how"
        )


class Peers:
    """
    The nodes of a run, as each sees the others: `logs/node<N>.json` holds a node's heartbeat and how its workers ended.

    A context manager: inside, this node writes its heartbeat. A single machine has nobody to tell, and writes nothing.
    """

    def __init__(self, run_dir: Path, node: Node) -> None:
        self.run_dir, self.node = run_dir, node
        self.mine: dict[str, Any] = {
            "rendezvous": node.rendezvous,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "beat": 0,
        }
        self.others = [rank for rank in range(node.count) if rank != node.rank]
        self.heard: dict[int, tuple[dict[str, Any], float]] = {}
        self.lock, self.done = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True, name="beat")

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

    def say(self, **news: Any) -> None:
        """Tell the others something."""
        if self.others:
            self._write(**news)

    def trouble(self) -> bool:
        """Whether another node's workers have failed, or the node is gone."""
        self._listen()
        failed = any((self._outcome_of(rank) or {}).get("state", "completed") != "completed" for rank in self.others)
        return failed or bool(self._lost())

    def agree(self, own: Outcome) -> Outcome:
        """Tell the others how this node's workers ended, hear them, and return the outcome of the run: that of the cause."""
        if not self.others:
            return own
        self._write(outcome=asdict(own) | {"time": time.time()})
        if own.state == "completed":
            return own
        # A victim waits for the cause to be known. If the cause is gone without a word, that takes longest.
        deadline = time.monotonic() + (LOST_S + SPEAK_S if own.collateral else SPEAK_S)
        while any(self._outcome_of(rank) is None for rank in self.others if rank not in self._lost()):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            self._listen()
        outcomes = [self.mine["outcome"], *(found for rank in self.others if (found := self._outcome_of(rank)))]
        causes = [each for each in outcomes if each["state"] != "completed" and not each["collateral"]]
        if causes:
            first = min(causes, key=lambda each: each["time"])
            return Outcome(first["state"], first["reason"], first["rank"], first["exit_code"])
        if lost := self._lost():
            names = ", ".join(str(self.heard[rank][0].get("host", rank)) for rank in lost)
            return Outcome("preempted", f"{names}: no sign of life for {LOST_S:g} s")
        return own

    def wait_for_head(self) -> None:
        """Return when the first node has finished, or is gone: srun ends those who take much longer than the first to end."""
        self._listen()
        deadline = time.monotonic() + LOST_S  # it may never have come
        while not self.heard[0][0].get("gone") if 0 in self.heard else time.monotonic() < deadline:
            if 0 in self._lost(silent=True):
                return
            time.sleep(POLL_S)
            self._listen()

    def _beat(self) -> None:
        while not self.done.wait(BEAT_S):
            self._write(beat=self.mine["beat"] + 1)

    def _write(self, **news: Any) -> None:
        with self.lock, suppress(OSError):  # on a full disk the others take this node for lost, which ends the run, too
            self.mine |= news
            write_json(node_file(self.run_dir, self.node.rank), self.mine)

    def _listen(self) -> None:
        now = time.monotonic()
        for rank in self.others:
            found = read_json(node_file(self.run_dir, rank))
            known = self.heard.get(rank)
            if found.get("rendezvous") == self.node.rendezvous and (known is None or known[0] != found):
                self.heard[rank] = found, now

    def _outcome_of(self, rank: int) -> dict[str, Any] | None:
        return self.heard[rank][0].get("outcome") if rank in self.heard else None

    def _lost(self, *, silent: bool = False) -> list[int]:
        """
        Nodes that were heard of, but not any more.

        Args:
            silent: include those that have told their outcome.
        """
        now = time.monotonic()
        return [
            rank
            for rank, (found, when) in self.heard.items()
            if now - when > LOST_S and (silent or found.get("outcome") is None)
        ]

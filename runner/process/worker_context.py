"""The context that a launcher passes to a worker: its place among the ranks, and their shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from meshrunner.recipes.meter import PHASES, Phase
from meshrunner.runner.process.shared_integers import SharedIntegers


@dataclass(frozen=True)
class Node:
    """This node's place among the nodes of a run."""

    rank: int
    count: int
    host: str
    """Host of the rendezvous: the node of rank 0."""
    port: int
    """TCP port of the rendezvous; 0: a free one, on a single node only."""
    rendezvous: str
    """Id of the rendezvous, new with each start of the job: workers of an earlier start cannot join."""


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in the run, and the memory it shares with its launcher."""

    rank: int
    local_rank: int
    workers: int
    """Workers per node."""
    node: Node
    device_type: str
    threads: int
    attempt: int
    port: SharedIntegers
    """One integer: the port of the rendezvous on the first node, 0 until rank 0 has opened it."""
    steps: SharedIntegers
    """The last completed step of each rank of the node."""
    phase: SharedIntegers
    """One integer: what the node's first rank is doing, as its place in PHASES."""
    stop_requested: SharedIntegers | None
    """One integer, not 0 once the run is to save a checkpoint and end; None where nothing requests that."""

    def doing(self, phase: Phase) -> None:
        """Let the launcher know what this rank begins; the node's first speaks for all."""
        if self.local_rank == 0:
            self.phase[0] = PHASES.index(phase)

    @property
    def world_size(self) -> int:
        return self.node.count * self.workers

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun would set, for user code that reads them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.node.host,
            "MASTER_PORT": str(self.port[0]),
        }

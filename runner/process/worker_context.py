"""What a worker is told by its launcher: its place among the ranks, and the memory both share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """This machine's place among those of a run."""

    rank: int
    count: int
    host: str
    """Where rank 0 of the workers is."""
    port: int
    """TCP port of the rendezvous; 0: one that is free, which only works on one machine."""
    rendezvous: str
    """Differs from one start of the job to the next: workers left from an earlier one are not taken for members."""


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in the run, and the memory it shares with its launcher."""

    rank: int
    local_rank: int
    workers: int
    """Per node."""
    node: Node
    device_type: str
    threads: int
    attempt: int
    port: Any
    """RawArray of one integer: the rendezvous port on the first node, 0 until rank 0 has opened it."""
    steps: Any
    """RawArray with the last completed step of every rank of the node."""
    stop_requested: Any
    """RawArray of one integer, not 0 when the run is requested to stop; None where that cannot be."""

    @property
    def world_size(self) -> int:
        return self.node.count * self.workers

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun would set, for code of a user's that looks there."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.node.host,
            "MASTER_PORT": str(self.port[0]),
        }

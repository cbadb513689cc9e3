"""The context that a launcher passes to a worker: the worker's rank and node, and memory shared with the launcher."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

from meshrunner.recipes.meter import PHASES, Phase


class SharedIntegers:
    """A fixed number of integers, initially 0, shared with child processes. Each integer has one writer, so there is no lock."""

    # An anonymous file (memfd) needs neither /dev/shm nor a temporary folder, unlike multiprocessing's arrays.

    def __init__(self, count: int, file: Any = None) -> None:
        """Create the shared memory. If `file` is given, it is a DupFd of the parent's shared memory: map that memory instead."""
        self._file = os.memfd_create("meshrunner") if file is None else file.detach()
        weakref.finalize(self, os.close, self._file)
        if file is None:
            os.ftruncate(self._file, 8 * count)
        self._values = memoryview(mmap.mmap(self._file, 8 * count)).cast("q")

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values.tolist())

    def __getitem__(self, index: int) -> int:
        return self._values[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._values[index] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedIntegers, (len(self), DupFd(self._file))


@dataclass(frozen=True)
class Node:
    """A node of a run, and the rendezvous of the run."""

    rank: int
    count: int
    host: str
    """Host name of the rendezvous, on the node of rank 0."""
    port: int
    """TCP port of the rendezvous. A run on a single node may use 0 to choose a free port."""
    rendezvous: str
    """Id of the rendezvous. Each start of the job has a new id, so that workers of an earlier start cannot join."""


@dataclass(frozen=True)
class WorkerContext:
    """The rank and node of a worker, and the memory that the worker shares with its launcher."""

    rank: int
    local_rank: int
    workers: int
    """Workers per node."""
    node: Node
    device_type: str
    threads: int
    attempt: int
    port: SharedIntegers
    """One integer: the port of the rendezvous. If rank 0 chooses the port, this is 0 until rank 0 opens the rendezvous."""
    steps: SharedIntegers
    """One integer per rank on this node, in the order of ranks: the rank's last completed step."""
    phase: SharedIntegers
    """One integer: the phase of this node's first rank, as an index into PHASES."""
    stop_requested: SharedIntegers | None
    """One integer, nonzero once the run should save a checkpoint and end; None if nothing can request a stop."""

    def doing(self, phase: Phase) -> None:
        """Tell the launcher that this rank enters a phase. Only the first rank of a node reports."""
        if self.local_rank == 0:
            self.phase[0] = PHASES.index(phase)

    @property
    def world_size(self) -> int:
        return self.node.count * self.workers

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that torchrun would set, for user code that reads them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.node.host,
            "MASTER_PORT": str(self.port[0]),
        }

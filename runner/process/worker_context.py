"""Defines the data that a launcher passes to each worker. A launcher is the process that starts a node's workers."""

import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

from meshrunner.recipes.meter import PHASES, Phase


class SharedIntegers:
    """Integers in memory that parent and child processes share without a lock. Each integer must have only one writer."""

    # An anonymous file (memfd) needs neither /dev/shm nor a temporary folder, unlike multiprocessing's arrays.

    def __init__(self, count: int, file: Any = None) -> None:
        """Create `count` zeros in new shared memory or, if `file` (a DupFd) is given, map the parent's shared memory."""
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
    """A node of a run, and the rendezvous address to which all ranks of the run connect."""

    rank: int
    count: int
    host: str
    """Name of the host on which rank 0 opens the rendezvous."""
    port: int
    """TCP port of the rendezvous. In a run on a single node, port 0 makes rank 0 choose a free port."""
    rendezvous: str
    """Id of the rendezvous. Each start of the SLURM job has a new id, so that workers of an earlier start cannot join."""


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
    """One integer: the port of the rendezvous, or 0 until rank 0 has chosen a port."""
    steps: SharedIntegers
    """One integer per rank on this node: the last step that the rank completed."""
    phase: SharedIntegers
    """One integer, an index in PHASES: the activity of this node's first rank, such as saving a checkpoint."""
    stop_requested: SharedIntegers | None
    """One integer, nonzero if the run should save a checkpoint and end; None if this run cannot be asked to stop."""
    emulated: bool = False
    """Whether this worker emulates its rank without other ranks (`launch.emulate`)."""

    def doing(self, phase: Phase) -> None:
        """Tell the launcher which phase begins, if this rank is the first rank of its node."""
        if self.local_rank == 0:
            self.phase[0] = PHASES.index(phase)

    @property
    def world_size(self) -> int:
        return self.node.count * self.workers

    @property
    def records(self) -> bool:
        """Whether this rank writes the run's measurements: rank 0 or, in an emulated run, the emulated rank."""
        return self.rank == 0 or self.emulated

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that torchrun would set. User code may read these variables."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.node.host,
            "MASTER_PORT": str(self.port[0]),
        }

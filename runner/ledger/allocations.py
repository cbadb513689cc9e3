"""Allocations by category and phase over time, and the peaks of memory that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "unsharded",
    "communication",
    "logits",
    "temporary",
)
"""Purposes of memory, in the order of tables and charts. `MemoryLedger` defines and assigns them."""
PERSISTENT = ("parameters", "gradients", "optimizer")
"""Categories of memory that outlives a step. Memory that is older than the ledger counts from the ledger's first moment."""
UNKNOWN = ("activations", "temporary")
"""Categories derived only from the moment of allocation. A later use may reveal a more precise one."""

START = "start"
"""Everything before the first step: the model is built, sharded and initialised."""
END = "end of backward"
"""Below the first block: the gradient of the embedding, and work that layouts do once all gradients are there."""
PARTS = (START, "forward", "loss", "backward", END, "update", "optimizer")
"""Parts of a step in order. update: gradient norm, clipping and whatever else follows backward."""


class Phase(NamedTuple):
    """A part of a step, within forward and backward one block's share of it."""

    step: int
    """Counted from 0; -1 at the start."""
    part: str
    """One of PARTS."""
    block: int | None = None
    """Index in the network's blocks; None before the first and after the last."""

    def __str__(self) -> str:
        return self.part if self.block is None else f"{self.part} of block {self.block}"


@dataclass(eq=False, slots=True)
class Allocation:
    """The memory of a storage for as long as it keeps its size."""

    nbytes: int
    category: str
    """One of CATEGORIES, for the whole lifetime. It may be refined while the memory is in use."""
    phase: Phase
    """Phase in which it was allocated."""
    allocated_at: int
    """Moment of the allocation, or of the first use if the memory is older than the ledger (see `begins_at`)."""
    stream: int = 0
    """Device stream on which it was allocated."""
    preexisting: bool = False
    """Whether it is older than the ledger."""
    freed_at: int | None = None
    """Moment of the release; None while it is held."""
    operator: str = ""
    """Schema name of the operator that returned it, such as `aten::mm`; empty if none did."""
    is_block_output: bool = False
    """Whether it is an output of one of the network's blocks."""

    @property
    def begins_at(self) -> int:
        """Moment from which it counts."""
        return 0 if self.preexisting and self.category in PERSISTENT else self.allocated_at

    def is_held(self, moment: int) -> bool:
        """Whether the memory is held after a moment."""
        return self.begins_at <= moment and (self.freed_at is None or self.freed_at > moment)


class PeakMemory(NamedTuple):
    """Bytes of memory at their maximum."""

    total: int
    by_category: dict[str, int]
    phase: Phase | None
    """None: nothing was allocated."""


class AllocationHistory:
    """Every allocation so far, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.now = 0
        """The present moment: the number of allocations and releases so far."""

    @property
    def peak(self) -> PeakMemory:
        """The peak so far."""
        return self.peak_of(lambda _: True)

    def peak_of(self, counts: Callable[[Phase], bool]) -> PeakMemory:
        """Return the peak within the phases for which `counts` is true."""
        most, when = 0, None
        for allocation, total in self._totals():
            if total > most and counts(allocation.phase):
                most, when = total, allocation
        if when is None:
            return PeakMemory(0, dict.fromkeys(CATEGORIES, 0), None)
        return PeakMemory(most, self.by_category(when.begins_at), when.phase)

    def peaks(self) -> dict[Phase, int]:
        """Return the highest total of every phase that allocates."""
        found: dict[Phase, int] = {}
        for allocation, total in self._totals():
            found[allocation.phase] = max(total, found.get(allocation.phase, 0))
        return found

    def by_category(self, moment: int) -> dict[str, int]:
        """Return the bytes of each category at a moment."""
        found = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.allocations:
            if allocation.is_held(moment):
                found[allocation.category] += allocation.nbytes
        return found

    def _totals(self) -> Iterator[tuple[Allocation, int]]:
        """Yield every allocation with the bytes that are held right after it."""
        change = [0] * (self.now + 1)
        for allocation in self.allocations:
            change[allocation.begins_at] += allocation.nbytes
            if allocation.freed_at is not None:
                change[allocation.freed_at] -= allocation.nbytes
        totals = list(accumulate(change))
        for allocation in self.allocations:
            yield allocation, totals[allocation.begins_at]

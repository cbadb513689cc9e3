"""Defines the history of allocations by category and phase, and computes peaks of memory."""

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
"""Categories of memory, in the order of tables and charts. `MemoryLedger` defines and assigns the categories."""
PERSISTENT = ("parameters", "gradients", "optimizer")
"""Categories of memory that outlives a step. If such memory is older than the ledger, it counts from moment 0."""
UNKNOWN = ("activations", "temporary")
"""Categories derived only from the phase of allocation. A later use of the memory may reveal a more precise category."""

START = "start"
"""Part before the first step, in which the model is built, sharded and initialised."""
END = "end of backward"
"""Part of backward below the first block: the embedding's gradient, and work of layouts once all gradients exist."""
PARTS = (START, "forward", "loss", "backward", END, "update", "optimizer")
"""Parts of a step in order. `update` is all work after backward except the optimizer, such as the gradient norm and clipping."""


class Phase(NamedTuple):
    """Part of a step. Forward and backward have a phase for each block."""

    step: int
    """Number of the step, counted from 0. It is -1 before the first step."""
    part: str
    """One of PARTS."""
    block: int | None = None
    """Index of the block in the network. None before the first block and after the last block."""

    def __str__(self) -> str:
        return self.part if self.block is None else f"{self.part} of block {self.block}"


@dataclass(eq=False, slots=True)
class Allocation:
    """Memory of a storage. If the storage is resized, the allocation ends and another begins."""

    nbytes: int
    category: str
    """One of CATEGORIES. The ledger may refine the category later. The refined category applies to the whole lifetime."""
    phase: Phase
    """Phase in which the memory was allocated."""
    allocated_at: int
    """Moment of the allocation, or of the first use if the memory is older than the ledger. See `begins_at`."""
    stream: int = 0
    """Number of the device stream on which the memory was allocated."""
    preexisting: bool = False
    """Whether the memory is older than the ledger."""
    freed_at: int | None = None
    """Moment of the release. None while the memory is held."""
    operator: str = ""
    """Schema name of the operator that returned the memory, such as `aten::mm`. Empty if no operator returned the memory."""
    is_block_output: bool = False
    """Whether the memory holds an output of a block of the network."""

    @property
    def begins_at(self) -> int:
        """Moment from which the memory counts."""
        return 0 if self.preexisting and self.category in PERSISTENT else self.allocated_at

    def is_held(self, moment: int) -> bool:
        """Whether the memory is held right after a moment."""
        return self.begins_at <= moment and (self.freed_at is None or self.freed_at > moment)


class PeakMemory(NamedTuple):
    """Bytes of memory at the moment of the highest total."""

    total: int
    by_category: dict[str, int]
    phase: Phase | None
    """Phase of the peak. None if nothing was allocated."""


class AllocationHistory:
    """History of all allocations so far, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.now = 0
        """Present moment: the number of allocations and releases so far."""

    @property
    def peak(self) -> PeakMemory:
        """Peak over all phases so far."""
        return self.peak_of(lambda _: True)

    def peak_of(self, counts: Callable[[Phase], bool]) -> PeakMemory:
        """Return the peak within the phases for which `counts(phase)` is true."""
        most, when = 0, None
        for allocation, total in self._totals():
            if total > most and counts(allocation.phase):
                most, when = total, allocation
        if when is None:
            return PeakMemory(0, dict.fromkeys(CATEGORIES, 0), None)
        return PeakMemory(most, self.by_category(when.begins_at), when.phase)

    def peaks(self) -> dict[Phase, int]:
        """Return phase -> highest total bytes, for every phase with an allocation."""
        found: dict[Phase, int] = {}
        for allocation, total in self._totals():
            found[allocation.phase] = max(total, found.get(allocation.phase, 0))
        return found

    def by_category(self, moment: int) -> dict[str, int]:
        """Return category -> bytes held at a moment."""
        found = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.allocations:
            if allocation.is_held(moment):
                found[allocation.category] += allocation.nbytes
        return found

    def _totals(self) -> Iterator[tuple[Allocation, int]]:
        """Yield (allocation, total bytes held right after it) for every allocation."""
        change = [0] * (self.now + 1)
        for allocation in self.allocations:
            change[allocation.begins_at] += allocation.nbytes
            if allocation.freed_at is not None:
                change[allocation.freed_at] -= allocation.nbytes
        totals = list(accumulate(change))
        for allocation in self.allocations:
            yield allocation, totals[allocation.begins_at]

"""Keep a history of memory allocations by category and phase, and compute memory peaks from it."""

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
"""Categories of memory that outlives a step. If such memory existed before the ledger, it counts as held from moment 0."""
UNKNOWN = ("activations", "temporary")
"""Provisional categories, derived only from the phase of allocation. Later use may reveal a more precise category."""

START = "start"
"""Name of the part before the first step, in which the model is built, sharded and initialised."""
END = "end of backward"
"""Name of the part after backward of block 0: backward of the embedding, then work that layouts do at the end of backward."""
PARTS = (START, "forward", "loss", "backward", END, "update", "optimizer")
"""Names of the parts, in order. `update` is all work after backward, such as clipping, except the optimizer step."""


class Phase(NamedTuple):
    """A part of a step. Forward and backward are divided into a phase for each block."""

    step: int
    """Number of the step, counted from 0. It is -1 before the first step."""
    part: str
    """One of PARTS."""
    block: int | None = None
    """Index of the block in the network; None in phases outside the blocks."""

    def __str__(self) -> str:
        return self.part if self.block is None else f"{self.part} of block {self.block}"


@dataclass(eq=False, slots=True)
class Allocation:
    """The memory of a tensor storage. Resizing the storage ends its allocation and begins another."""

    nbytes: int
    category: str
    """One of CATEGORIES. If the ledger refines the category later, the new category applies to the whole lifetime."""
    phase: Phase
    allocated_at: int
    """Moment of the allocation. If the memory existed before the ledger, this is the moment of its first use. See `begins_at`."""
    stream: int = 0
    """Number of the device stream on which the memory was allocated."""
    preexisting: bool = False
    """Whether the memory existed before the ledger."""
    freed_at: int | None = None
    """Moment at which the memory was freed; None while it is held."""
    operator: str = ""
    """Schema name of the operator that returned the memory, such as `aten::mm`; empty if no operator did."""
    is_block_output: bool = False
    """Whether the memory holds an output of a block of the network."""

    @property
    def begins_at(self) -> int:
        """Moment from which the memory counts as held."""
        return 0 if self.preexisting and self.category in PERSISTENT else self.allocated_at

    def is_held(self, moment: int) -> bool:
        """Return whether the memory is held right after `moment`."""
        return self.begins_at <= moment and (self.freed_at is None or self.freed_at > moment)


class PeakMemory(NamedTuple):
    """The bytes held at the moment at which the total is highest, in total and by category."""

    total: int
    by_category: dict[str, int]
    phase: Phase | None
    """Phase in which the peak occurred; None if nothing was allocated."""


class AllocationHistory:
    """History of all allocations so far, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.now = 0
        """Present moment: the number of allocations and releases so far."""

    @property
    def peak(self) -> PeakMemory:
        """Peak memory over all phases so far."""
        return self.peak_of(lambda _: True)

    def peak_of(self, counts: Callable[[Phase], bool]) -> PeakMemory:
        """Return the peak memory among the phases for which `counts(phase)` is true."""
        most, when = 0, None
        for allocation, total in self._totals():
            if total > most and counts(allocation.phase):
                most, when = total, allocation
        if when is None:
            return PeakMemory(0, dict.fromkeys(CATEGORIES, 0), None)
        return PeakMemory(most, self.by_category(when.begins_at), when.phase)

    def peaks(self) -> dict[Phase, int]:
        """Return the highest total in bytes for each phase with an allocation."""
        found: dict[Phase, int] = {}
        for allocation, total in self._totals():
            found[allocation.phase] = max(total, found.get(allocation.phase, 0))
        return found

    def by_category(self, moment: int) -> dict[str, int]:
        """Return the bytes held in each category right after `moment`."""
        found = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.allocations:
            if allocation.is_held(moment):
                found[allocation.category] += allocation.nbytes
        return found

    def _totals(self) -> Iterator[tuple[Allocation, int]]:
        """Yield each allocation together with the total bytes held right after it."""
        change = [0] * (self.now + 1)
        for allocation in self.allocations:
            change[allocation.begins_at] += allocation.nbytes
            if allocation.freed_at is not None:
                change[allocation.freed_at] -= allocation.nbytes
        totals = list(accumulate(change))
        for allocation in self.allocations:
            yield allocation, totals[allocation.begins_at]

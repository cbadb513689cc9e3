"""Keep a history of the memory allocations of tensors, and compute memory peaks from it.

A *moment* is a point in time, counted in allocations and releases. The *ledger* is the `MemoryLedger` that records the history.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

PERSISTENT = ("parameters", "gradients", "optimizer")
"""Categories of memory that outlives a step. Persistent memory that existed before the ledger counts as held from moment 0."""
CATEGORIES = (*PERSISTENT, "activations", "unsharded", "communication", "logits", "temporary")
"""Categories of memory, in the order of tables and charts. The docstring of `MemoryLedger` explains each category."""
UNKNOWN = ("activations", "temporary")
"""Categories that the ledger assigns as a first guess. The ledger corrects a guess that later use of the memory disproves."""

START = "start"
"""Part of a run in which the model is built, sharded and initialised, before the first step."""
END = "end of backward"
"""Part of a step after backward of the first block: backward of the embedding, then the final backward work of DDP or FSDP."""


class Phase(NamedTuple):
    """Part of a step. Each block of the network has a forward phase and a backward phase of its own."""

    step: int
    """Number of the step, counted from 0; -1 before the first step."""
    part: str
    """Part of the step: START, `forward`, `loss`, `backward`, END, `update` or `optimizer`. The part `update` is all work after
    backward except the optimizer step, such as gradient clipping."""
    block: int | None = None
    """Index of the block in the network; None in phases outside the blocks."""

    def __str__(self) -> str:
        return self.part if self.block is None else f"{self.part} of block {self.block}"


@dataclass(eq=False, slots=True)
class Allocation:
    """Memory of a tensor storage, from its allocation to its release. A resize of the storage ends the allocation."""

    nbytes: int
    category: str
    """One of CATEGORIES. If the ledger corrects its first guess, the new category applies to the allocation's whole lifetime."""
    phase: Phase
    allocated_at: int
    """Moment of the allocation, or of the first use if the memory existed before the ledger (see `begins_at`)."""
    stream: int = 0
    """Number of the device stream on which the memory was allocated."""
    preexisting: bool = False
    freed_at: int | None = None
    """Moment at which the memory was freed; None while it is held."""
    operator: str = ""
    """Schema name of the operator that returned the memory, such as `aten::mm`; empty if no operator returned it."""
    is_block_output: bool = False

    @property
    def begins_at(self) -> int:
        """Moment from which the memory counts as held."""
        return 0 if self.preexisting and self.category in PERSISTENT else self.allocated_at

    def is_held(self, moment: int) -> bool:
        """Return whether the memory is held right after `moment`."""
        return self.begins_at <= moment and (self.freed_at is None or self.freed_at > moment)


class PeakMemory(NamedTuple):
    """Bytes held at a memory peak, in total and in each category."""

    total: int
    by_category: dict[str, int]
    phase: Phase | None
    """Phase in which the peak occurred; None if nothing was allocated."""


class AllocationHistory:
    """All allocations so far, in order, and the memory peaks computed from them."""

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
        """Return the peak bytes of each phase that has an allocation."""
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
        """Yield each allocation with the total bytes held right after it. Other threads may free memory during the iteration."""
        change = [0] * (self.now + 1)
        for allocation in self.allocations:
            change[allocation.begins_at] += allocation.nbytes
            if allocation.freed_at is not None and allocation.freed_at < len(change):
                change[allocation.freed_at] -= allocation.nbytes
        totals = list(accumulate(change))
        for allocation in self.allocations:
            yield allocation, totals[allocation.begins_at]

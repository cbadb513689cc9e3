"""What a replay finds out about memory."""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.runner.ledger.memory_ledger import Allocation
from meshrunner.runner.ledger.phases import Phase


class Change(NamedTuple):
    """A life's memory is allocated, or free again; or another part of the step begins."""

    allocation: Allocation | None
    """None: a part begins."""
    nbytes: int
    """Of the life's block, below 0 where that is free again."""
    phase: Phase
    """The present one, of a birth that of the life."""
    reserved: int | None
    """Bytes of segments after it; None: not known."""


class Peak(NamedTuple):
    """Most memory at a time."""

    nbytes: int
    phase: Phase
    """In which it was reached. What was reserved in an earlier step, and is so still, keeps that step's."""


class Peaks(NamedTuple):
    """Of one step."""

    active: Peak
    """Of blocks in use; a freed one counts until the streams that use it have passed (torch's `active_bytes`)."""
    reserved: Peak
    """Of segments, so with the cache (torch's `reserved_bytes`)."""


class Replayed(NamedTuple):
    """What became of the memory. In bytes."""

    startup_active: int
    """Peak before the first step."""
    startup_reserved: int
    """Peak before the first step; the cache that it leaves is reserved in the steps, too."""
    steps: dict[int, Peaks]
    """By the number of the step, in their order."""
    peak_active: Peak
    """Of the last step; of the start, if there is none."""
    peak_reserved: Peak
    """Of the last step; of the start, if there is none."""
    by_category: dict[str, int]
    """What `peak_active` was for."""
    retries: int
    """How often the whole cache was given up for a request."""
    failed: Phase | None
    """In which memory ran out; the peaks are those until then."""
    asked: int
    """For which request; 0 if memory never ran out."""

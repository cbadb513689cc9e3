"""Judges whether the predicted memory of a run fits its device, and says why in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

GIB = 2**30
Answer = Literal["fits", "borderline", "does not fit", "not planned"]
FITS: Answer = "fits"
BORDERLINE: Answer = "borderline"
DOES_NOT_FIT: Answer = "does not fit"
NOT_PLANNED: Answer = "not planned"


class Verdict(NamedTuple):
    """The answer and the sentence that explains it."""

    answer: str
    """An `Answer`, or `skipped` for a combination that cannot run."""
    reason: str


def judge(needed: int, capacity: int, error: float, runs_in: Callable[[int], bool]) -> Answer:
    """
    Return the answer for a run that takes `needed` bytes when memory is unlimited.

    Args:
        capacity: bytes of the device that the run can have.
        error: of the prediction, as a fraction.
        runs_in: whether the run completes in the given bytes, if need be after allocator cache flushes.
    """
    if needed <= capacity * (1 - error) or runs_in(round(capacity * (1 - error))):
        return FITS
    return BORDERLINE if runs_in(round(capacity * (1 + error))) else DOES_NOT_FIT


def explain(
    kind: str, needed: int, capacity: int, device: str, by_category: Mapping[str, int], flushes: int | None = None
) -> str:
    """
    Return the arithmetic behind an answer as a sentence.

    Args:
        kind: of memory: `reserved` or `active`.
        by_category: bytes at the peak; empty if unknown.
        flushes: of the allocator's cache, after which the run completes within `capacity`; None if it does not complete.
    """
    left = capacity - needed
    margin = f"{left / GIB:.2f} GiB left" if left >= 0 else f"{-left / GIB:.2f} GiB too much"
    if left < 0 and flushes is not None:
        margin += f", but it still fits after {flushes} allocator cache flush{'es' * (flushes != 1)}"
    sentence = f"{needed / GIB:.2f} GiB {kind} of the {capacity / GIB:.2f} GiB available to torch on {device}: {margin}"
    largest = max(by_category, key=by_category.__getitem__, default=None)
    return (
        sentence
        if largest is None
        else f"{sentence}; the largest part is {largest}, {by_category[largest] / GIB:.2f} GiB"
    )

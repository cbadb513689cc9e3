"""Whether a run's memory fits: what it needs against what the device has for it, within the error of the prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

GIB = 2**30
Answer = Literal["fits", "borderline", "does not fit", "not planned"]
FITS: Answer = "fits"
BORDERLINE: Answer = "borderline"
MISFIT: Answer = "does not fit"
NOT_PLANNED: Answer = "not planned"


class Verdict(NamedTuple):
    """The answer and its reason, a sentence."""

    answer: Answer
    reason: str


def answer(needed: int, capacity: int, error: float, runs_in: Callable[[int], bool]) -> Answer:
    """
    The answer for a run that would take `needed` bytes if it had all that it wants.

    Args:
        capacity: bytes that the device has for it.
        error: of the prediction, as a fraction.
        runs_in: whether it also runs in so many bytes, when the allocator has to give up its cache.
    """
    if needed <= capacity * (1 - error) or runs_in(round(capacity * (1 - error))):
        return FITS
    return BORDERLINE if runs_in(round(capacity * (1 + error))) else MISFIT


def reason(what: str, needed: int, capacity: int, device: str, by_category: dict[str, int]) -> str:
    """
    The arithmetic behind an answer.

    Args:
        what: that is predicted: `reserved` or `active` memory.
        by_category: bytes at the peak.
    """
    left = capacity - needed
    margin = f"{left / GIB:.2f} GiB left" if left >= 0 else f"{-left / GIB:.2f} GiB too much"
    most = max(by_category, key=by_category.__getitem__)
    return (
        f"{needed / GIB:.2f} GiB {what} of the {capacity / GIB:.2f} GiB that torch can have on {device}: {margin}; "
        f"most are {most}, {by_category[most] / GIB:.2f} GiB"
    )

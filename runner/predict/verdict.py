"""
The answer: whether a run's memory fits, what it needs against what the device has for it, within the error of the prediction;
and the keys that an answer has as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

GIB = 2**30
MEMORY = (
    "memory/peak_active_gib",
    "memory/peak_active_pct",
    "memory/peak_reserved_gib",
    "memory/peak_reserved_pct",
    "memory/alloc_retries",
    "memory/startup_gib",
    "memory/phase",
    "memory/by_category_gib",
    "memory/block_gib",
    "memory/error_pct",
)
SPEED = (
    "perf/wps",
    "perf/mfu",
    "perf/step_time_s",
    "perf/seconds_by_part",
    "perf/exposed_communication_s",
    "perf/calibrated",
    "perf/error_pct",
)
Answer = Literal["fits", "borderline", "does not fit", "not planned"]
FITS: Answer = "fits"
BORDERLINE: Answer = "borderline"
MISFIT: Answer = "does not fit"
NOT_PLANNED: Answer = "not planned"


class Verdict(NamedTuple):
    """The answer and its reason, a sentence."""

    answer: str
    """An `Answer`, or `skipped` for what cannot run."""
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


def reason(
    what: str, needed: int, capacity: int, device: str, by_category: dict[str, int], retries: int | None = None
) -> str:
    """
    The arithmetic behind an answer.

    Args:
        what: that is predicted: `reserved` or `active` memory.
        by_category: bytes at the peak; empty: they are not known.
        retries: how often a run gives up its cache that gets through with less than it needed; None: it does not get through.
    """
    left = capacity - needed
    margin = f"{left / GIB:.2f} GiB left" if left >= 0 else f"{-left / GIB:.2f} GiB too much"
    if left < 0 and retries is not None:
        margin += f", but it runs, and gives up its cache {retries} time{'s' * (retries != 1)}"
    said = f"{needed / GIB:.2f} GiB {what} of the {capacity / GIB:.2f} GiB that torch can have on {device}: {margin}"
    most = max(by_category, key=by_category.__getitem__, default=None)
    return said if most is None else f"{said}; most are {most}, {by_category[most] / GIB:.2f} GiB"


def as_json(verdict: Verdict, figures: dict[str, Any] | None = None, remarks: Iterable[str] = ()) -> dict[str, Any]:
    """
    One object, of the same keys whatever is known.

    Args:
        figures: those of MEMORY and SPEED; None: none is known.
        remarks: sentences about what was left out of account, and why a figure is not known.
    """
    known = figures if figures is not None else dict.fromkeys((*MEMORY, *SPEED))
    return {"verdict": verdict.answer, "reason": verdict.reason, "rank": 0, **known, "remarks": list(remarks)}

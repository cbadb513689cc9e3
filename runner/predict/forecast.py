"""Defines the forecast of a run (verdict, figures, JSON) and the sentences that explain the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshrunner.runner.console import one_line
from meshrunner.runner.own_code import innermost
from meshrunner.runner.predict.allocator.segments import GIB

if TYPE_CHECKING:
    from meshrunner.runner.predict.replay.timeline import Timeline

Answer = Literal["fits", "borderline", "does not fit", "not planned"]
FITS: Answer = "fits"
BORDERLINE: Answer = "borderline"
DOES_NOT_FIT: Answer = "does not fit"
NOT_PLANNED: Answer = "not planned"
NEEDS_VALUES = re.compile(r"meta\b(?!-pytorch)|fake impl", re.IGNORECASE)
"""
Pattern of torch's errors about operators without a meta kernel and about reading values of meta tensors. It does not match
`meta-pytorch`, because every error message of the compiler ends with a URL that contains this word.
"""


class Verdict(NamedTuple):
    """Whether a run fits, and a sentence with the reason."""

    answer: str
    """An `Answer`, or `skipped` for a combination that cannot run."""
    reason: str


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of one device. In the JSON, a field's key is `memory/` followed by the field's name."""

    peak_active_gib: float
    """Peak memory that tensors use within a step."""
    peak_active_pct: float
    """`peak_active_gib` as a share of the device's memory, in percent."""
    peak_reserved_gib: float | None
    """Peak memory that the caching allocator holds within a step. None if no allocator is modelled."""
    peak_reserved_pct: float | None
    """`peak_reserved_gib` as a share of the device's memory, in percent."""
    alloc_retries: int | None
    """Number of cache flushes that keep the allocator within the device's memory. None if no allocator is modelled."""
    startup_gib: float
    """Peak of active memory before the first step."""
    phase: str
    """Part of the step in which active memory peaks."""
    by_category_gib: dict[str, float]
    """Memory of each category when active memory peaks. The values add up to `peak_active_gib`."""
    block_gib: float | None
    """Activations that the largest block keeps from its forward to its backward. None if the whole model is compiled."""
    error_pct: float
    """Bound on the relative error of the predicted peak, in percent (see docs/measurements/plan.md)."""


@dataclass(frozen=True)
class SpeedForecast:
    """Speed of the run. In the JSON, a field's key is `perf/` followed by the field's name."""

    wps: float
    """Tokens ("words") per second per device."""
    mfu: float | None
    """Model FLOPs utilisation in percent. None if the device's peak rate is unknown."""
    step_time_s: float
    seconds_by_part: dict[str, float]
    """Seconds of a step spent on each of `simulated_clock.PARTS`. Parts overlap in time."""
    exposed_communication_s: float
    """Seconds per step during which the compute stream idles and waits for communication."""
    calibrated: bool
    """Whether the device's constants were fitted to measured runs."""
    error_pct: float
    """Largest error of `wps` in percent, over the calibration runs if `calibrated`, otherwise `workload.ERROR_PCT`."""


@dataclass(frozen=True)
class Forecast:
    """Prediction of one run."""

    verdict: Verdict
    memory: MemoryForecast | None = None
    """Figures of memory. None if the run cannot be predicted."""
    speed: SpeedForecast | None = None
    """Figures of speed. None if the run cannot be predicted or a rate of the device is unknown."""
    remarks: tuple[str, ...] = ()
    """Sentences about settings that are not modelled and about figures that are unknown."""
    timeline: Timeline | None = None
    """Memory over the last step. None unless the caller requested a timeline."""

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON object. Unknown figures are null, so the keys are always the same."""
        return {
            "verdict": self.verdict.answer,
            "reason": self.verdict.reason,
            "rank": 0,
            **{f"memory/{field.name}": getattr(self.memory, field.name, None) for field in fields(MemoryForecast)},
            **{f"perf/{field.name}": getattr(self.speed, field.name, None) for field in fields(SpeedForecast)},
            "remarks": list(self.remarks),
        }


def judge(needed: int, capacity: int, error: float, runs_in: Callable[[int], bool]) -> Answer:
    """
    Judge whether a run fits in `capacity` bytes. With unlimited memory, the run would use `needed` bytes.

    `error` is the relative error of the prediction. `runs_in(nbytes)` returns whether the run completes in `nbytes` bytes.
    """
    if needed <= capacity * (1 - error) or runs_in(round(capacity * (1 - error))):
        return FITS
    return BORDERLINE if runs_in(round(capacity * (1 + error))) else DOES_NOT_FIT


def explain(
    kind: str, needed: int, capacity: int, device: str, by_category: Mapping[str, int], flushes: int | None = None
) -> str:
    """
    Return a sentence that compares the needed memory with the capacity.

    `by_category` is empty if the categories are unknown. `flushes` is None if the run does not complete within `capacity`.
    """
    left = capacity - needed
    margin = f"{left / GIB:.2f} GiB left" if left >= 0 else f"{-left / GIB:.2f} GiB too much"
    if left < 0 and flushes is not None:
        margin += f", but it still fits after {flushes} allocator cache flush{'es' * (flushes != 1)}"
    sentence = f"{needed / GIB:.2f} GiB {kind} of the {capacity / GIB:.2f} GiB available to torch on {device}: {margin}"
    if not by_category:
        return sentence
    largest = max(by_category, key=by_category.__getitem__)
    return f"{sentence}; the largest part is {largest}, {by_category[largest] / GIB:.2f} GiB"


def needs_memory(error: Exception) -> bool:
    """Return whether an error occurs only on meta, where tensors have shapes but no values."""
    return bool(NEEDS_VALUES.search(str(error)))


def why(error: Exception) -> str:
    """Return the reason why a recipe cannot be traced, and the innermost line of the user's code in the traceback, if any."""
    inner = getattr(error, "inner_exception", None)  # the compiler wraps exceptions
    error = inner if isinstance(inner, Exception) else error
    first = one_line(next(iter(str(error).splitlines()), ""))
    kind, line = type(error).__name__, innermost(error)
    where = f" ({line})" if line else ""
    if needs_memory(error):
        message = first.partition(". ")[0].rstrip(".")
        return f"an operator or the model itself needs values, but a trace has only shapes: {kind}: {message}{where}"
    return f"{kind}: {first}{where}" if first else f"{kind}{where}"

"""Defines the forecast of a run: whether the run fits its devices, the reason, and the predicted memory and speed."""

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
"""Pattern of errors that only the meta device causes: an operator has no meta kernel, or code reads the values of a meta tensor.
The pattern excludes `meta-pytorch`, which is part of the URL at the end of every error message of the compiler."""


class Verdict(NamedTuple):
    """Whether a run fits, and a sentence with the reason."""

    answer: str
    """A value of `Answer`, or `skipped` for a combination of settings that cannot run."""
    reason: str


@dataclass(frozen=True)
class MemoryForecast:
    """Predicted memory of one device. In a forecast's JSON, the key of a field begins with `memory/`, such as `memory/phase`."""

    peak_active_gib: float
    """Peak of active memory (memory that tensors use) within a step."""
    peak_active_pct: float
    """`peak_active_gib` as a share of the device's memory, in percent."""
    peak_reserved_gib: float | None
    """Peak memory that the caching allocator reserves within a step; None if no allocator is modelled."""
    peak_reserved_pct: float | None
    """`peak_reserved_gib` as a share of the device's memory, in percent."""
    alloc_retries: int | None
    """Number of times the allocator flushes its cache to stay within the device's memory; None if no allocator is modelled."""
    startup_gib: float
    """Peak of active memory before the first step."""
    phase: str
    """Part of the step in which active memory peaks, such as `backward of block 3`."""
    by_category_gib: dict[str, float]
    """Memory at the peak of active memory, keyed by category, such as `gradients`. The values add up to `peak_active_gib`."""
    block_gib: float | None
    """Activations that the largest block keeps for backward, including the block's output. None if the run has a pipeline or if
    the whole model is compiled."""
    error_pct: float
    """Bound on the relative error of the predicted peak, in percent (see docs/measurements/plan.md)."""


@dataclass(frozen=True)
class SpeedForecast:
    """Predicted speed of the run. In a forecast's JSON, the key of a field begins with `perf/`, such as `perf/wps`."""

    wps: float
    """Tokens ("words") per second per device."""
    mfu: float | None
    """Model FLOPs utilisation in percent; None if the device's peak rate is unknown."""
    step_time_s: float
    seconds_by_part: dict[str, float]
    """Seconds per step, keyed by kind of work (`simulated_clock.PARTS`). Kinds overlap, so the sum can exceed `step_time_s`."""
    exposed_communication_s: float
    """Seconds per step in which the compute stream idles because it waits for communication or for other pipeline ranks."""
    calibrated: bool
    """Whether the device's rates were fitted to measured runs (calibrated)."""
    error_pct: float
    """Largest error of the speeds predicted for the measured runs that `error_basis` names, in percent."""
    error_basis: str
    """Sentence that names the measured runs whose speeds were compared with predictions, and states `error_pct`."""
    pipeline_idle_pct: float | None = None
    """Share of the step in which a pipeline rank waits for others, averaged over ranks, in percent; None without a pipeline."""


@dataclass(frozen=True)
class Forecast:
    """Prediction of one run."""

    verdict: Verdict
    memory: MemoryForecast | None = None
    """Predicted memory, or None if the run cannot be predicted."""
    speed: SpeedForecast | None = None
    """Predicted speed, or None if the run cannot be predicted or a rate of the device is unknown."""
    remarks: tuple[str, ...] = ()
    """Sentences about settings that are not modelled and about rates of the device that are unknown."""
    timeline: Timeline | None = None
    """Memory over time within the last traced step, for a chart; None if the caller did not request the timeline."""
    wps_on: tuple[float, ...] = ()
    """Tokens per second per device, for each device in the argument `variants` of `predict`."""
    rank: int = 0
    """Rank whose memory is predicted. Without a pipeline: 0. With one: the emulated rank, else the rank with most memory."""

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object with the same keys for every run. Unknown values are null."""
        return {
            "verdict": self.verdict.answer,
            "reason": self.verdict.reason,
            "rank": self.rank,
            **{f"memory/{field.name}": getattr(self.memory, field.name, None) for field in fields(MemoryForecast)},
            **{f"perf/{field.name}": getattr(self.speed, field.name, None) for field in fields(SpeedForecast)},
            "remarks": list(self.remarks),
        }


def not_planned(reason: str) -> Forecast:
    return Forecast(Verdict(NOT_PLANNED, reason))


def judge(needed: int, capacity: int, error: float, runs_in: Callable[[int], bool]) -> Answer:
    """Judge whether a run fits in `capacity` bytes. With unlimited memory, the run is predicted to use `needed` bytes.

    `error` bounds the relative error of predictions. A run fits if it completes in (1 - `error`) x `capacity` bytes, and is
    borderline if it completes only in (1 + `error`) x `capacity`. `runs_in(n)` returns whether the run completes in n bytes.
    """
    if needed <= capacity * (1 - error) or runs_in(round(capacity * (1 - error))):
        return FITS
    return BORDERLINE if runs_in(round(capacity * (1 + error))) else DOES_NOT_FIT


def explain(
    kind: str, needed: int, capacity: int, device: str, by_category: Mapping[str, int], flushes: int | None = None
) -> str:
    """Return a sentence that compares the needed memory with the capacity. kind: kind of memory, such as `reserved`. by_category:
    empty if unknown. flushes: number of cache flushes needed to run in `capacity` bytes, or None if the run cannot complete."""
    left = capacity - needed
    margin = f"{left / GIB:.2f} GiB left" if left >= 0 else f"{-left / GIB:.2f} GiB too much"
    if left < 0 and flushes is not None:
        margin += f", but it still fits after {flushes} allocator cache flush{'es' * (flushes != 1)}"
    sentence = f"{needed / GIB:.2f} GiB {kind} of the {capacity / GIB:.2f} GiB available to torch on {device}: {margin}"
    if not by_category:
        return sentence
    largest = max(by_category, key=by_category.__getitem__)
    return f"{sentence}; the largest part is {largest}, {by_category[largest] / GIB:.2f} GiB"


def why(error: Exception) -> str:
    """Return the reason why a recipe cannot be traced, with the innermost line of user code in the traceback, if any."""
    inner = getattr(error, "inner_exception", None)  # the compiler wraps exceptions
    error = inner if isinstance(inner, Exception) else error
    first = one_line(next(iter(str(error).splitlines()), ""))
    kind, line = type(error).__name__, innermost(error)
    where = f" ({line})" if line else ""
    if NEEDS_VALUES.search(str(error)):
        message = first.partition(". ")[0].rstrip(".")
        needs = "an operator or the model itself needs tensor values, but a trace has only shapes"
        return f"{needs}: {kind}: {message}{where}"
    return f"{kind}: {first}{where}" if first else f"{kind}{where}"

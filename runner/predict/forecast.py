"""The forecast of a run, and the JSON that `plan --json` prints and plan.json holds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from meshrunner.runner.predict.verdict import Verdict

if TYPE_CHECKING:
    from meshrunner.runner.predict.replay.timeline import Timeline


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of one device. Each field is a key of the JSON, behind `memory/`."""

    peak_active_gib: float
    """Peak within a step of memory in use by tensors."""
    peak_active_pct: float
    """Share of the device's memory, in percent."""
    peak_reserved_gib: float | None
    """Peak within a step of memory held by the caching allocator; None where no allocator is modelled."""
    peak_reserved_pct: float | None
    alloc_retries: int | None
    """Number of allocator cache flushes within the device's memory; None where no allocator is modelled."""
    startup_gib: float
    """Peak of active memory before the first step."""
    phase: str
    """Part of the step in which active memory peaks."""
    by_category_gib: dict[str, float]
    """Active memory at its peak by category; the values add up to `peak_active_gib`."""
    block_gib: float | None
    """Activations that the largest block adds from its forward to its backward; None if blocks cannot be told apart."""
    error_pct: float
    """Largest error of the predicted peak that published measurements have shown."""


@dataclass(frozen=True)
class SpeedForecast:
    """Speed of the run. Each field is a key of the JSON, behind `perf/`."""

    wps: float
    """Words per second and device."""
    mfu: float | None
    """Model FLOPs utilisation in percent; None if the device's peak rate is unknown."""
    step_time_s: float
    seconds_by_part: dict[str, float]
    """Seconds of work by `simulated_clock.PARTS`; parts overlap."""
    exposed_communication_s: float
    """Seconds of a step during which compute waits for communication."""
    calibrated: bool
    """Whether the device's constants were fitted to measured runs."""
    error_pct: float


@dataclass(frozen=True)
class Forecast:
    """Prediction of one run."""

    verdict: Verdict
    memory: MemoryForecast | None = None
    """None if the run cannot be predicted."""
    speed: SpeedForecast | None = None
    """None if the run or a rate of the device it needs cannot be predicted."""
    remarks: tuple[str, ...] = ()
    """Sentences about settings that are not modelled and figures that are unknown."""
    timeline: Timeline | None = None
    """Memory over the last step, if it was asked for."""

    def as_json(self) -> dict[str, Any]:
        """Return one object that has the same keys whatever is known."""
        return {
            "verdict": self.verdict.answer,
            "reason": self.verdict.reason,
            "rank": 0,
            **_keyed("memory/", MemoryForecast, self.memory),
            **_keyed("perf/", SpeedForecast, self.speed),
            "remarks": list(self.remarks),
        }


def _keyed(prefix: str, kind: type[Any], figures: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by their key, all None if there are no figures."""
    return {prefix + field.name: None if figures is None else getattr(figures, field.name) for field in fields(kind)}

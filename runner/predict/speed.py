"""Words per second of a rehearsed run on a device whose speed is known."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.predict.record.trace_events import EventLog, Operator
from meshrunner.runner.predict.timing.clock import StepClock, Timed
from meshrunner.runner.predict.timing.rates import Rate, Rates, rates
from meshrunner.runner.predict.trace.depth import Depths
from meshrunner.runner.predict.verdict import SPEED

ERROR_PCT = 7.0
"""
Largest difference from published words per second, docs/measurements/plan.md, with shares of the peak rates that were fitted
to no run of the device.
"""


class Rehearsed(NamedTuple):
    """What a run's speed on a device follows from."""

    experiment: Experiment
    workers: int
    """Of a node."""
    tokens: float
    """Of a step, of one device."""
    left_out: int
    """Micro batches of a step that the logs have not."""
    logs: tuple[EventLog, ...]
    """Of the whole run; or of the two shallow ones that tell of its depth."""
    depths: Depths | None
    """None: the log is of the whole."""

    def timed(self, hardware: GPU | CPU) -> Timed:
        """The time of a step; raises ConfigError where a rate of the device that it needs is not known."""
        each = [_timed(log, self.clock(hardware), self.left_out) for log in self.logs]
        return each[0] if self.depths is None else _deep(self.depths, *each)

    def unknown_rate(self, hardware: GPU | CPU) -> str:
        """Which rate of the device, needed here, is not known, in a sentence; empty: none."""
        known = self._rates(hardware)
        entries = (entry for log in self.logs for entry in log if isinstance(entry, Operator))
        for kind, dtype in dict.fromkeys((each.kind, each.dtype) for each in entries if each.flops):
            try:
                if kind != "memory":
                    known.flops_per_second(kind, dtype)
            except ConfigError as error:
                return str(error)
        return ""

    def clock(self, hardware: GPU | CPU) -> StepClock:
        """One that has taken nothing yet."""
        return StepClock(self._rates(hardware))

    def _rates(self, hardware: GPU | CPU) -> Rates:
        return rates(hardware, self.rate_of_fp32(), self.workers)

    def rate_of_fp32(self) -> Rate:
        """The field of `hardware.peak` that products of fp32 are multiplied at."""
        return "fp32" if self.experiment.precision.fp32_matmul == "highest" else "tf32"


def figures(run: Rehearsed, hardware: GPU | CPU | None, timed: Timed | None) -> dict[str, Any]:
    """Those of SPEED, None where they are not known."""
    if timed is None or hardware is None:
        return dict.fromkeys(SPEED)
    wps = run.tokens / timed.seconds
    compute = run.experiment.precision.compute
    peak = hardware.peak_tflops(run.rate_of_fp32() if compute == "fp32" else compute)
    flops = run.experiment.model.flops_per_token(run.experiment.seq_len).total
    values = (
        wps,
        None if peak is None else 100 * wps * flops / (peak * 1e12),
        timed.seconds,
        timed.seconds_by_part,
        timed.exposed_communication_s,
        hardware.calibrated is not None,
        hardware.calibrated.error_pct if hardware.calibrated else ERROR_PCT,
    )
    return dict(zip(SPEED, values, strict=True))


def _timed(log: EventLog, clock: StepClock, left_out: int) -> Timed:
    """The last step's."""
    for entry in log:
        clock.take(entry)
    return clock.step_ends(left_out)


def _deep(depths: Depths, shallow: Timed, deeper: Timed) -> Timed:
    """At full depth, where every further block takes as long as between the two."""
    blocks = (depths.full - depths.deeper) / (depths.deeper - depths.shallow)

    def line(first: float, second: float) -> float:
        return second + blocks * (second - first)

    return Timed(
        line(shallow.seconds, deeper.seconds),
        {part: line(shallow.seconds_by_part[part], value) for part, value in deeper.seconds_by_part.items()},
        max(0.0, line(shallow.exposed_communication_s, deeper.exposed_communication_s)),
    )

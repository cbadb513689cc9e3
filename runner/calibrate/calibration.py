"""Calibrates a device: reads measured runs, fits its constants, and checks each run against the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrunner.runner.calibrate.fit import Fitted, constant, fit, leave_one_out_errors
from meshrunner.runner.calibrate.measured import read_measured
from meshrunner.runner.config.hardware import CPU, GPU, Calibrated


@dataclass(frozen=True)
class CheckedRun:
    """A measured combination and how well the fit predicts it."""

    name: str
    wps: float
    """Measured words per second and device."""
    fitted_wps: float
    """Words per second predicted with the fitted constants."""
    error_pct: float
    """Error of `fitted_wps` in percent."""
    left_out_error_pct: float
    """Error in percent when the constants are fitted to the other runs only."""


@dataclass(frozen=True)
class Calibration:
    """Fitted constants of a device, and the evidence for them."""

    runs: list[CheckedRun]
    left_out: dict[str, str]
    """Combination -> reason why it was not used."""
    before: GPU | CPU
    hardware: GPU | CPU
    """Device with the fitted constants."""
    fitted: Fitted

    def as_json(self) -> dict[str, Any]:
        """Return one object."""
        keys = self.fitted.unknown
        return {
            "runs": [
                {
                    "run": run.name,
                    "perf/wps": run.wps,
                    "plan/perf/wps": run.fitted_wps,
                    "error_pct": run.error_pct,
                    "left_out_error_pct": run.left_out_error_pct,
                }
                for run in self.runs
            ],
            "left_out": self.left_out,
            "tells_apart": self.fitted.tells_apart,
            "ratio_unknown_pct": 100 * self.fitted.ratio_unknown,
            "unknown_pct": {key: 100 * share for key, share in keys.items()},
            "before": {key: constant(self.before, key) for key in keys},
            "fitted": {key: constant(self.hardware, key) for key in keys},
            "hardware": self.hardware.model_dump(mode="json"),
        }


def calibrate_device(folders: Sequence[Path]) -> Calibration:
    """Fit the constants of the device that ran all runs in `folders`; raises ConfigError as `read_measured`."""
    measured = read_measured(folders)
    fitted = fit(measured.hardware, measured.runs)
    errors = leave_one_out_errors(measured.hardware, measured.runs, fitted)
    # Round up, so that the stated error is never smaller than an observed one.
    error_pct = math.ceil(10 * max(map(abs, errors))) / 10
    calibrated = Calibrated(runs=len(measured.runs), error_pct=error_pct)
    hardware = fitted.hardware.model_copy(update={"calibrated": calibrated})
    runs = [
        CheckedRun(run.name, run.wps, run.workload.wps(hardware), run.error_pct(hardware), error)
        for run, error in zip(measured.runs, errors, strict=True)
    ]
    return Calibration(runs, measured.left_out, measured.hardware, hardware, fitted)

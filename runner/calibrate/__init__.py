"""Fits the constants behind predicted speeds to measured runs."""

from __future__ import annotations

from meshrunner.runner.calibrate.calibration import Calibration, calibrate_device

__all__ = ["Calibration", "calibrate_device"]

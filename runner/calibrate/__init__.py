"""Fits constants to measured runs. Speeds are predicted from these constants."""

from __future__ import annotations

from meshrunner.runner.calibrate.calibration import Calibration, calibrate_device

__all__ = ["Calibration", "calibrate_device"]

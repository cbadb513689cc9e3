"""Fits the constants of a device, such as its matmul efficiency, so that predicted speeds match measured runs."""

from meshrunner.runner.calibrate.calibration import Calibration, calibrate_device

__all__ = ["Calibration", "calibrate_device"]

"""Fits the constants of a device, such as its matmul efficiency, so that predicted speeds match measured runs."""

from meshrunner.runner.calibrate.calibration import SPEED_OF_CPU, Calibration, as_yaml, calibrate_device
from meshrunner.runner.calibrate.fit import constants_of, scaled

__all__ = ["SPEED_OF_CPU", "Calibration", "as_yaml", "calibrate_device", "constants_of", "scaled"]

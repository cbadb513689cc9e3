"""Fits the constants of a device, such as its matmul efficiency, so that predicted speeds match measured runs.

The result is the maximum a posteriori estimate of the constants. Each constant has a log-normal prior around its value before the
fit. Measured speeds are assumed to have log-normal noise. A constant that affects no run keeps its value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from meshrunner.runner.config.hardware import CPU, GPU

if TYPE_CHECKING:
    from meshrunner.runner.predict import Workload

NOISE_OF_GPU, NOISE_OF_CPU = 0.02, 0.05
"""Assumed standard deviation of log(predicted speed / measured speed), due to measurement noise and prediction errors."""


class FittedConstant(NamedTuple):
    """Constant in the `hardware` section of a GPU or CPU that the fit may change."""

    key: str
    """Key within the `hardware` section, such as efficiency.matmul."""
    unknown: float
    """Uncertainty before the fit: the standard deviation of the constant's logarithm."""
    most: float = math.inf
    """Largest value that the constant can take."""
    coupled: str = ""
    """Key of a second constant that is scaled by the same factor, or empty if there is none."""


OF_GPU = (
    FittedConstant("efficiency.matmul", 0.3, 1.0),
    FittedConstant("efficiency.memory", 0.3, 1.0),
    FittedConstant("efficiency.attention", 0.3, 1.0, "efficiency.attention_backward"),
    FittedConstant("efficiency.contention", 0.5, 1.0),
    FittedConstant("efficiency.host_s", 0.5),
)
OF_CPU = (
    FittedConstant("speed.fp32_tflops", 1.0, coupled="speed.bf16_tflops"),
    FittedConstant("speed.memory_bandwidth", 1.0),
    FittedConstant("speed.attention", 1.0),
    FittedConstant("speed.operator_s", 1.0),
    FittedConstant("speed.link_bandwidth", 1.0),
    FittedConstant("speed.collective_s", 1.0),
    FittedConstant("speed.jitter", 1.0),
)
"""Constants to fit. Matmul speed and memory bandwidth must be first, because `fit` computes `ratio_unknown` from these two."""
TOLD_APART = 0.5
"""Largest `Fitted.ratio_unknown` at which the runs suffice to fit matmul speed and memory bandwidth separately."""


class MeasuredRun(NamedTuple):
    """A combination of settings with its traced workload and its measured speed."""

    name: str
    workload: Workload
    wps: float
    """Measured tokens per second per device."""

    def error_pct(self, hardware: GPU | CPU) -> float:
        """Return the percentage by which the speed predicted for a device exceeds the measured speed."""
        return 100 * (self.workload.wps(hardware) / self.wps - 1)


class Fitted(NamedTuple):
    """Result of a fit."""

    hardware: GPU | CPU
    unknown: dict[str, float]
    """Standard deviation of each constant's logarithm after the fit, divided by the deviation before the fit."""
    ratio_unknown: float
    """Like a value of `unknown`, but for the ratio matmul speed / memory bandwidth, which decides how much compiling helps."""

    @property
    def tells_apart(self) -> bool:
        """Whether the runs suffice to fit matmul speed and memory bandwidth separately."""
        return self.ratio_unknown <= TOLD_APART


def fit(hardware: GPU | CPU, runs: Sequence[MeasuredRun], near: GPU | CPU | None = None) -> Fitted:
    """Fit a device's constants, starting from `near` (default: `hardware`). Raise ConfigError if a run needs an unknown rate."""
    noise = NOISE_OF_GPU if isinstance(hardware, GPU) else NOISE_OF_CPU
    constants = constants_of(hardware)
    priors = np.array([each.unknown for each in constants])

    def with_factors(logarithms: Any) -> GPU | CPU:
        return scaled(hardware, {each.key: math.exp(x) for each, x in zip(constants, logarithms, strict=True)})

    def residuals(logarithms: Any) -> Any:
        """Return residuals in standard deviations: log(predicted / measured speed) per run, then log(factor) per constant."""
        device = with_factors(logarithms)
        errors = [math.log(each.workload.wps(device) / each.wps) for each in runs]
        return np.concatenate([np.array(errors) / noise, logarithms / priors])

    most = [math.log(each.most / constant(hardware, each.key)) for each in constants]
    begin = [math.log(constant(near or hardware, each.key) / constant(hardware, each.key)) for each in constants]
    start = np.minimum(begin, np.array(most) - 1e-6)  # least_squares needs a start inside the bounds
    bounds = -np.inf, np.maximum(most, start + 1e-9)
    found = least_squares(residuals, start, bounds=bounds, diff_step=1e-3, ftol=1e-4, xtol=1e-4)
    left = np.linalg.inv(found.jac.T @ found.jac)
    unknown = dict(zip((each.key for each in constants), (np.sqrt(np.diag(left)) / priors).tolist(), strict=True))
    ratio = left[0, 0] + left[1, 1] - 2 * left[0, 1]
    return Fitted(with_factors(found.x), unknown, math.sqrt(ratio / (priors[0] ** 2 + priors[1] ** 2)))


def leave_one_out_errors(hardware: GPU | CPU, runs: Sequence[MeasuredRun], fitted: Fitted) -> list[float]:
    """Return each run's prediction error in percent, with constants fitted to the other runs. `fitted` is the fit to all runs."""
    fits = (fit(hardware, [*runs[:i], *runs[i + 1 :]], fitted.hardware) for i in range(len(runs)))
    return [run.error_pct(each.hardware) for run, each in zip(runs, fits, strict=True)]


def constant(hardware: GPU | CPU, key: str) -> float:
    """Return the value of a constant, which must be set. `key` is the constant's key in `hardware`, such as efficiency.matmul."""
    return float(attrgetter(key)(hardware))


def scaled(hardware: GPU | CPU, factors: dict[str, float]) -> GPU | CPU:
    """Return a copy of `hardware` with each constant multiplied by its factor in `factors`, but limited to the constant's `most`.
    If a coupled constant has no factor in `factors`, multiply it by the factor of the constant to which it is coupled."""
    for each in (*OF_GPU, *OF_CPU):
        for key in filter(None, (each.key, each.coupled)):
            factor = factors.get(key, factors.get(each.key))
            section, _, name = key.partition(".")
            if factor is not None and (known := attrgetter(key)(hardware)) is not None:
                part = getattr(hardware, section).model_copy(update={name: min(known * factor, each.most)})
                hardware = hardware.model_copy(update={section: part})
    return hardware


def constants_of(hardware: GPU | CPU) -> list[FittedConstant]:
    """Return the constants to fit: those that are not zero. If a constant is None, its `coupled` constant takes its place."""
    known = (
        each if attrgetter(each.key)(hardware) is not None else each._replace(key=each.coupled)
        for each in (OF_GPU if isinstance(hardware, GPU) else OF_CPU)
    )
    return [each for each in known if constant(hardware, each.key) > 0]

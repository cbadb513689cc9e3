"""
Fits the constants that speeds are predicted from to measured runs.

A run's words per second are a function of the constants, which replays its log; the fit is the most probable one for constants
that are log-normal about those that the device had, and speeds that are measured to some noise (maximum a posteriori, by
`scipy.optimize.least_squares`). So what no run depends on stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.predict.speed import Rehearsed

NOISE_OF_GPU, NOISE_OF_CPU = 0.02, 0.05
"""Standard deviation of the logarithm of a measured speed, what the model of the device leaves out included."""


class Constant(NamedTuple):
    """Something to fit."""

    key: str
    """Of the option, dotted."""
    unknown: float
    """Standard deviation of its logarithm before any run is seen."""
    most: float = math.inf
    """The largest value."""


OF_GPU = (
    Constant("efficiency.matmul", 0.3, 1.0),
    Constant("efficiency.memory", 0.3, 1.0),
    Constant("efficiency.attention", 0.3, 1.0),  # and attention_backward, in proportion
    Constant("efficiency.contention", 0.5, 1.0),
    Constant("efficiency.host_s", 0.5),
)
OF_CPU = (
    Constant("speed.fp32_tflops", 1.0),  # and bf16_tflops, in proportion
    Constant("speed.memory_bandwidth", 1.0),
    Constant("speed.attention", 1.0),
    Constant("speed.operator_s", 1.0),
    Constant("speed.link_bandwidth", 1.0),
    Constant("speed.collective_s", 1.0),
    Constant("speed.jitter", 1.0),
)
TOGETHER = {
    "efficiency.attention": "efficiency.attention_backward",
    "speed.fp32_tflops": "speed.bf16_tflops",
}
"""Constants that change by the same factor."""
TOLD_APART = 0.5
"""Share of what was unknown about the ratio of products to memory that runs may leave unknown, at most."""


class Observed(NamedTuple):
    """A combination that was measured."""

    name: str
    run: Rehearsed
    wps: float
    """Words per second and device."""


class Fitted(NamedTuple):
    """Constants that explain what was measured."""

    hardware: GPU | CPU
    unknown: dict[str, float]
    """By constant: the standard deviation of its logarithm that is left, as a share of that of before."""
    ratio_unknown: float
    """The same of the ratio of products to memory, which say how eager and compiled code differ."""

    @property
    def tells_apart(self) -> bool:
        """Whether the runs tell products from memory."""
        return self.ratio_unknown <= TOLD_APART


def fit(hardware: GPU | CPU, observed: Sequence[Observed], near: GPU | CPU | None = None) -> Fitted:
    """
    Fit the constants of a device.

    Args:
        near: where the search begins; None: at the constants that the device has.

    Raises:
        ConfigError: a rate of the device that a run needs is not known.
    """
    noise = NOISE_OF_GPU if isinstance(hardware, GPU) else NOISE_OF_CPU
    constants = _constants(hardware)
    priors = np.array([each.unknown for each in constants])

    def residuals(factors: Any) -> Any:
        """[runs + constants]: differences of logarithms, in standard deviations."""
        device = changed(hardware, {each.key: math.exp(x) for each, x in zip(constants, factors, strict=True)})
        logarithms = [math.log(predicted_wps(each.run, device) / each.wps) for each in observed]
        return np.concatenate([np.array(logarithms) / noise, factors / priors])

    most = [math.log(each.most / value(hardware, each.key)) for each in constants]
    begin = [math.log(value(near or hardware, each.key) / value(hardware, each.key)) for each in constants]
    start = np.minimum(begin, np.array(most) - 1e-6)  # inside the bounds, as the method wants it
    found = least_squares(
        residuals, start, bounds=(-np.inf, np.maximum(most, start + 1e-9)), diff_step=1e-3, ftol=1e-4, xtol=1e-4
    )
    left = np.linalg.inv(found.jac.T @ found.jac)
    unknown = dict(zip((each.key for each in constants), np.sqrt(np.diag(left)) / priors, strict=True))
    ratio = left[0, 0] + left[1, 1] - 2 * left[0, 1]
    return Fitted(
        changed(hardware, {each.key: math.exp(x) for each, x in zip(constants, found.x, strict=True)}),
        {key: float(share) for key, share in unknown.items()},
        math.sqrt(ratio / (priors[0] ** 2 + priors[1] ** 2)),
    )


def left_out_errors(hardware: GPU | CPU, observed: Sequence[Observed], fitted: Fitted) -> list[float]:
    """
    Of each: percent by which its predicted speed is off when the constants are fitted to the others.

    Args:
        fitted: to all.
    """
    errors = []
    for i, each in enumerate(observed):
        device = fit(hardware, [*observed[:i], *observed[i + 1 :]], fitted.hardware).hardware
        errors.append(100 * (predicted_wps(each.run, device) / each.wps - 1))
    return errors


def predicted_wps(run: Rehearsed, hardware: GPU | CPU) -> float:
    """Words per second and device."""
    return run.tokens / run.timed(hardware).seconds


def _constants(hardware: GPU | CPU) -> list[Constant]:
    """What is to fit of a device. What is said to be nothing stays so; for what is not known stands what changes with it."""
    known = (
        each if _known(hardware, each.key) is not None else each._replace(key=TOGETHER[each.key])
        for each in (OF_GPU if isinstance(hardware, GPU) else OF_CPU)
    )
    return [each for each in known if value(hardware, each.key) > 0]


def value(hardware: GPU | CPU, key: str) -> float:
    """A constant of an option."""
    if (known := _known(hardware, key)) is None:
        raise KeyError(key)
    return known


def _known(hardware: GPU | CPU, key: str) -> float | None:
    section, _, name = key.partition(".")
    found: float | None = getattr(getattr(hardware, section), name)
    return found


def changed(hardware: GPU | CPU, factors: dict[str, float]) -> GPU | CPU:
    """An option whose constants are so many times as large, within their bounds."""
    bounds = {key: each.most for each in (*OF_GPU, *OF_CPU) for key in (each.key, TOGETHER.get(each.key))}
    sections: dict[str, dict[str, float]] = {}
    for key, factor in factors.items():
        for each in filter(None, (key, TOGETHER.get(key))):
            if (known := _known(hardware, each)) is not None:
                section, _, name = each.partition(".")
                sections.setdefault(section, {})[name] = min(known * factor, bounds[each])
    return hardware.model_copy(
        update={
            section: getattr(hardware, section).model_copy(update=constants) for section, constants in sections.items()
        }
    )

"""Combines predictions and measured runs into a probability distribution (`Belief`) of the speeds of all combinations.

The logarithm of a combination's speed is the sum of three parts:

- the predicted speed, which depends on constants of the device that are known only roughly (see `Response`);
- an error of each option, such as compile=per_block, shared by all combinations with this option;
- an error of the individual combination.

A measured speed also contains noise, and a drift that is equal for all runs of a wave (a batch of consecutive runs). The prior of
each error is normal around zero. The prior of each constant is log-normal around its value before the first run. If predictions
are linear in the logarithms of the constants, the posterior of the log speeds is also normal (Rasmussen and Williams 2006,
section 2.7). Predictions are therefore linearised at the most probable constants.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

COMMON = 0.05
"""Standard deviation of the prediction error (in log speed) that all combinations share."""
OPTION = {"parallelism": 0.06, "compile": 0.03}
OTHER_OPTION = 0.01
"""Standard deviation of the error that all combinations with the same option share: OPTION by key, OTHER_OPTION otherwise."""
OWN = 0.005
"""Standard deviation of each combination's individual prediction error (in log speed)."""
DRIFT = 0.02
"""Standard deviation of the drift, which is the change in the machine's log speed from one wave of runs to the next."""
NEWTON_STEPS = 10
PER_COEFFICIENT = 2
"""Number of predictions per polynomial coefficient when a `Response` is fitted. Each prediction uses new random constants."""


def points_for(spread: Array) -> Array:
    """Draw random constants for the predictions that a `Response` needs. Return log(constant / value before the first run), shape
    [points, constants]. `spread`: standard deviations of the logarithms, shape [constants]."""
    coefficients = (len(spread) + 1) * (len(spread) + 2) // 2
    return np.random.default_rng(0).normal(0, spread, (PER_COEFFICIENT * coefficients, len(spread)))


class Response:
    """Predicted speeds as functions of a device's constants: quadratic polynomials in the logarithms of the constants."""

    def __init__(self, points: Array, speeds: Array) -> None:
        """Fit the polynomials to predictions at several points. A polynomial must have fewer coefficients than there are points.
        `points`: log(constant / value before the first run), shape [points, constants]. `speeds`: logarithms of the predicted
        speeds, shape [combinations, points]."""
        count = points.shape[1]
        rows, columns = np.triu_indices(count)
        terms = np.column_stack([np.ones(len(points)), points, points[:, rows] * points[:, columns]])
        coefficients = np.linalg.lstsq(terms, speeds.T, rcond=None)[0]
        self.misfit: Array = (speeds.T - terms @ coefficients).std(axis=0)
        """Standard deviation of the differences between predictions and polynomial, shape [combinations]."""
        self._at_zero, self._linear = coefficients[0], coefficients[1 : 1 + count].T
        self._quadratic = np.zeros((len(speeds), count, count))
        self._quadratic[:, rows, columns] = coefficients[1 + count :].T
        self._quadratic = (self._quadratic + self._quadratic.swapaxes(1, 2)) / 2

    def at(self, constants: Array) -> tuple[Array, Array]:
        """Return the log speeds at `constants`, shape [combinations], and their gradients, shape [combinations, constants]."""
        curved = self._quadratic @ constants
        return self._at_zero + (self._linear + curved) @ constants, self._linear + 2 * curved


class Measured(NamedTuple):
    """A completed run with its measured speed."""

    combination: int
    speed: float
    """Logarithm of the measured speed."""
    wave: int
    """Number of the wave, a batch of runs that follow each other closely."""


class Belief(NamedTuple):
    """Joint normal distribution of the logarithms of all combinations' speeds."""

    mean: Array
    """Shape [combinations]."""
    covariance: Array
    """Shape [combinations, combinations]."""
    constants: Array
    """Most probable log(constant / value before the first run), shape [constants]."""


class Prior:
    """Prior distribution of the speeds, before the first run."""

    def __init__(self, response: Response, constants: Array, combinations: Sequence[Mapping[str, str]]) -> None:
        """Compute the covariance of the errors. `constants`: standard deviations of the logarithms of the constants.
        `combinations`: the options of each combination, such as {"compile": "per_block"}."""
        self._response, self._constants = response, constants
        errors = np.full((len(combinations), len(combinations)), COMMON**2)
        for key in sorted(set().union(*combinations)):
            options = np.array([each.get(key, "") for each in combinations])
            errors += OPTION.get(key, OTHER_OPTION) ** 2 * (options[:, None] == options)
        self._errors = errors + np.diag(OWN**2 + response.misfit**2)

    def after(self, runs: Sequence[Measured], noise: float) -> Belief:
        """Return the posterior distribution after `runs`. `noise`: standard deviation of the logarithm of a measured speed."""
        index, speeds = np.array([run.combination for run in runs], int), np.array([run.speed for run in runs])
        waves = np.array([run.wave for run in runs], int)
        errors = noise**2 * np.eye(len(runs)) + DRIFT**2 * (waves[:, None] == waves)
        constants = np.zeros(len(self._constants))
        for _ in range(NEWTON_STEPS):
            values, slopes = self._response.at(constants)
            spread = slopes * self._constants**2
            mean, covariance = values - slopes @ constants, spread @ slopes.T + self._errors
            gain = np.linalg.inv(covariance[np.ix_(index, index)] + errors)
            surprise = gain @ (speeds - mean[index])
            before, constants = constants, spread[index].T @ surprise
            if np.abs(constants - before).max(initial=0.0) < 1e-4:
                break
        seen = covariance[:, index]
        return Belief(mean + seen @ surprise, covariance - seen @ gain @ seen.T, constants)

"""Chooses which combinations to run next, and estimates how much faster than the best one so far another one may be."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from meshrunner.runner.tune.belief import Belief

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Points and weights with which to integrate over a standard normal variable (Gauss-Hermite quadrature)."""
SAMPLES = 2000
CONFIDENCE = 0.95
LIKELY = 0.05
"""Probability of being the fastest above which a combination is a leader."""


class Outlook(NamedTuple):
    """The best combination so far, and how much faster another one may be."""

    best: int
    """Number of the combination with the highest expected speed among those that were run."""
    chance: float
    """Probability that a combination that was not run is faster than the best one by more than the tolerance."""
    bound: float
    """Upper limit, with probability CONFIDENCE, of the fraction by which any combination is faster than the best one."""


def outlook(belief: Belief, tried: Collection[int], tolerance: float, seed: int) -> Outlook:
    """Judge the combinations that were run (`tried`, not empty). tolerance: fraction of the best speed."""
    own = np.array(sorted(tried))
    best = int(own[belief.mean[own].argmax()])
    normal = np.random.default_rng(seed).standard_normal((len(belief.mean), SAMPLES))
    root = np.linalg.cholesky(belief.covariance + 1e-10 * np.eye(len(normal)))  # the smallest eigenvalues may be zero
    speeds = belief.mean[:, None] + root @ normal
    ahead = speeds - speeds[best]
    ahead[best] = -np.inf
    bound = np.quantile(ahead.max(axis=0, initial=0.0), CONFIDENCE)
    ahead[own] = -np.inf
    chance = (ahead.max(axis=0) > np.log1p(tolerance)).mean()
    return Outlook(best, float(chance), float(np.expm1(bound)))


def leaders(belief: Belief, tried: Collection[int], seed: int) -> list[int]:
    """Return each of the combinations that were run that is the fastest of these with a probability over LIKELY."""
    own = np.array(sorted(tried))
    mean, covariance = belief.mean[own], belief.covariance[np.ix_(own, own)]
    normal = np.random.default_rng(seed).multivariate_normal(mean, covariance, SAMPLES)
    shares = np.bincount(normal.argmax(axis=1), minlength=len(own)) / SAMPLES
    return [int(number) for number in own[shares > LIKELY]]


def next_wave(belief: Belief, tried: Collection[int], size: int, noise: float) -> list[int]:
    """Return the combinations to run next: those whose runs are likely to help most in finding the best combination.

    A combination may run again. Each choice maximises the knowledge gradient (Frazier, Powell and Dayanik 2009, "The
    Knowledge-Gradient Policy for Correlated Normal Beliefs"). It is the mean of the highest expected speed, after the chosen
    runs, among all combinations that were run or chosen. noise: standard deviation of the logarithm of a measured speed.
    """
    mean, covariance, known = belief.mean, belief.covariance, set(tried)
    chosen: list[int] = []
    for _ in range(min(size, len(mean))):
        # shift[i, j]: standard deviation of the change of combination i's expected speed by a run of combination j
        shift = covariance / np.sqrt(covariance.diagonal() + noise**2)
        highest = mean[:, None] + shift.diagonal()[:, None] * NODES
        for other in known:
            np.maximum(highest, mean[other] + shift[other][:, None] * NODES, out=highest)
        gain = highest @ WEIGHTS
        gain[chosen] = -np.inf
        number = int(gain.argmax())
        chosen.append(number)
        known.add(number)
        seen = covariance[:, number]
        covariance = covariance - np.outer(seen, seen) / (seen[number] + noise**2)
    return chosen

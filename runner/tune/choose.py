"""Chooses the combinations to run next, and estimates how much faster another combination may be than the best one so far."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from meshrunner.runner.tune.belief import Belief

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Points and weights that integrate over a standard normal variable (Gauss-Hermite quadrature)."""
SAMPLES = 2000
CONFIDENCE = 0.95
LIKELY = 0.05
"""A combination is a leader if the probability that it is the fastest exceeds this value."""


class Outlook(NamedTuple):
    """The best combination so far, and how much faster another combination may be."""

    best: int
    """Number of the combination that has the highest expected speed among the combinations that were run."""
    chance: float
    """Probability that at least one combination without a run is faster than `best` by more than the tolerance."""
    bound: float
    """Bound on the fraction by which any combination is faster than `best`; true with probability CONFIDENCE."""


def outlook(belief: Belief, tried: Collection[int], tolerance: float, seed: int) -> Outlook:
    """Find the best combination in `tried`, and estimate from random samples how much faster another combination may be.
    `tried` holds the combinations that were run and is not empty. `tolerance` is tune.tolerance."""
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
    """Return the combinations in `tried` whose probability of being the fastest in `tried` exceeds LIKELY."""
    own = np.array(sorted(tried))
    mean, covariance = belief.mean[own], belief.covariance[np.ix_(own, own)]
    normal = np.random.default_rng(seed).multivariate_normal(mean, covariance, SAMPLES)
    shares = np.bincount(normal.argmax(axis=1), minlength=len(own)) / SAMPLES
    return [int(number) for number in own[shares > LIKELY]]


def next_wave(belief: Belief, tried: Collection[int], size: int, noise: float) -> list[int]:
    """Return the combinations whose runs are likely to help most in finding the best combination.

    Combinations that were run may be chosen again. Each choice maximises the knowledge gradient (Frazier, Powell and Dayanik
    2009, "The Knowledge-Gradient Policy for Correlated Normal Beliefs"). The gradient is the highest expected speed among the
    combinations that were run or are chosen, averaged over the possible results of the new run. `noise`: as in `Prior.after`.
    """
    mean, covariance, known = belief.mean, belief.covariance, set(tried)
    chosen: list[int] = []
    for _ in range(min(size, len(mean))):
        # shift[i, j]: standard deviation of the change in combination i's expected speed that a run of combination j causes
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

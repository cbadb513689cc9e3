"""Whether two groups of measurements differ by more than what varies from run to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

REPEATS = 3
"""Runs on each side below which nothing is tested."""
ALPHA = 0.01
"""Probability of taking noise for a difference, of a pair. Of three against three runs, what is found is about four times
the standard deviation of a run or more."""
INTERVALS = 2000


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """
    Welch's t-test, two-sided: the probability of a difference of means at least as large where there is none.

    The values are one figure per run (the run's median speed), so that what is tested is the noise between runs, not that
    between steps of one run, which are not independent. Unequal variances are expected: layouts jitter differently. A
    permutation test is no alternative: of 3 against 3 runs it cannot give less than 0.1. Not corrected for many rows.

    Returns:
        None with fewer than REPEATS values on a side.
    """
    if min(len(a), len(b)) < REPEATS:
        return None
    difference = abs(fmean(a) - fmean(b))
    of_a, of_b = variance(a) / len(a), variance(b) / len(b)
    if of_a + of_b <= 0:
        return 1.0 if difference == 0 else 0.0
    t = difference / math.sqrt(of_a + of_b)
    freedom = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))  # Welch-Satterthwaite
    return 1 - _student_within(t, freedom)


def _student_within(t: float, freedom: float) -> float:
    """P(|T| <= t) of Student's distribution: with T = sqrt(freedom) tan(u) its density is proportional to cos(u)^(freedom-1)."""
    constant = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    width = math.atan(t / math.sqrt(freedom)) / INTERVALS
    density = [math.pow(math.cos(i * width), freedom - 1) for i in range(INTERVALS + 1)]
    simpson = density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])
    return min(1.0, constant * simpson * width / 3)

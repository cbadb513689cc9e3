"""Test whether two groups of measurements differ by more than the noise between runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

REPEATS = 3
"""Smallest number of runs on each side for a test."""
ALPHA = 0.01
"""Probability of taking noise for a difference in one pair. With three runs on each side, a test finds differences of about
four times the standard deviation of a run or more."""


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """
    Return the two-sided p-value of Welch's t-test; None with fewer than REPEATS values on a side.

    Each value is one run's median speed: the steps of one run are not independent. Variances may differ, because layouts jitter
    differently. A permutation test cannot replace it: with 3 runs on each side, its p-value is at least 0.1. The p-value is not
    corrected for the number of rows.
    """
    if min(len(a), len(b)) < REPEATS:
        return None
    difference = abs(fmean(a) - fmean(b))
    share_a, share_b = variance(a) / len(a), variance(b) / len(b)
    if share_a + share_b <= 0:
        return 1.0 if difference == 0 else 0.0
    from scipy.special import stdtr  # importing it takes longer than most tables; scipy.stats takes four times as long

    t = difference / math.sqrt(share_a + share_b)
    freedom = (share_a + share_b) ** 2 / (share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1))  # Welch-Satterthwaite
    return float(2 * stdtr(freedom, -t))

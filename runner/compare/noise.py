"""Test whether two groups of measurements differ by more than the noise between runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

REPEATS = 3
"""A row is tested against its baseline only if each of the two has at least this many runs."""
ALPHA = 0.01
"""Probability that a test mistakes noise for a difference between a row and its baseline. With three runs of the row and three
of the baseline, a test detects differences of at least about four times the standard deviation between runs."""


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """
    Return the two-sided p-value of Welch's t-test; None if `a` or `b` has fewer than REPEATS values.

    Each value is one run's median speed, because the steps of one run are not independent. The test lets `a` and `b` have
    different variances, because layouts jitter differently. A permutation test of 3 against 3 runs would never detect a
    difference: its p-value is at least 0.1, above ALPHA. The p-value is not corrected for the number of rows.
    """
    if min(len(a), len(b)) < REPEATS:
        return None
    difference = abs(fmean(a) - fmean(b))
    share_a, share_b = variance(a) / len(a), variance(b) / len(b)
    if share_a + share_b <= 0:
        return 1.0 if difference == 0 else 0.0
    from scipy.special import stdtr  # a slow import, but importing scipy.stats takes four times as long

    t = difference / math.sqrt(share_a + share_b)
    freedom = (share_a + share_b) ** 2 / (share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1))  # Welch-Satterthwaite
    return float(2 * stdtr(freedom, -t))

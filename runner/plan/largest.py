"""The largest value of a setting with which a run still fits."""

from __future__ import annotations

from collections.abc import Callable

MOST = 2**16
"""Where the search ends."""


def largest(fits: Callable[[int], bool], least: int = 1) -> int | None:
    """
    The largest whole number that fits; what is above one that does not fit is taken not to fit either.

    Args:
        least: where the search begins; None is returned if it does not fit.
    """
    if not fits(least):
        return None
    below, above = least, 2 * least
    while above <= MOST and fits(above):
        below, above = above, 2 * above
    above = min(above, MOST + 1)
    while above - below > 1:
        middle = (below + above) // 2
        if fits(middle):
            below = middle
        else:
            above = middle
    return below

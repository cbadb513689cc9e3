"""Test whether the rows of a table differ by more than the noise between runs.

Repeats form rounds: a round runs every combination once, in random order (a randomised complete block design). The equation is

    log(value) = combination + round + noise

Drift of the machine's speed from round to round therefore does not count as noise. The equations are solved by least squares,
even if runs are missing. Logarithms turn differences into ratios.

Each row has its own variance. With three repeats, a row's residuals alone say little about its variance. `Noise` therefore
averages a row's variance with the pooled variance of all rows (empirical Bayes, as in Smyth 2004). In this average, the pooled
variance has the weight of `d` degrees of freedom. The method of moments yields a large `d` if the rows' variances differ no
more than chance explains, and a small `d` if some rows are noisier than others. Three runs can have the same speed by chance,
even if the steps of each run scatter. A row's variance is therefore at least the variance that the scatter of the steps causes
(`summary.relative_error`).

tests/unit/compare/test_noise.py simulates sweeps of 2 to 40 rows whose standard deviations differ by up to a factor of 3. At most
6% of the simulated tables report a false difference from the baseline. If the baseline is three times as noisy as all other rows,
8 to 20% of the tables report a false difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from statistics import fmean, median, variance
from typing import TYPE_CHECKING, Any, NamedTuple

from meshrunner.runner.rundir import repeat_number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from meshrunner.runner.compare.runs import Row
    from meshrunner.runner.figures import Figure

    Array = NDArray[np.float64]

REPEATS = 3
"""Minimum number of runs that each of two rows must have for a test of their difference."""
ALPHA = 0.05
"""Probability that a table reports a difference although all its rows are equal."""
SHARE = 0.8
"""Share of ALPHA for the tests against the baseline. The rest of ALPHA is for the tests of the fastest row against other rows."""
POWER = 0.9
"""Probability with which a test detects the difference that `Noise.visible` returns."""
EQUAL = 1e-12
"""Differences of logarithms and their standard errors count as 0 up to this value, because rounding can cause them."""

Values = Mapping[Any, float]
"""Values of a figure in the runs of a row, keyed by round. A run that belongs to no round has a unique key."""
Pair = tuple[Hashable, Hashable]
"""The names of two rows."""


class Difference(NamedTuple):
    """The difference of two rows in the logarithm of a figure."""

    log_ratio: float
    error: float
    """Standard error of `log_ratio`."""
    freedom: float
    """Degrees of freedom of `error`."""

    @property
    def percent(self) -> float:
        """The percentage by which the geometric mean of one row exceeds the geometric mean of the other row."""
        return _percent(self.log_ratio)

    @property
    def p_value(self) -> float:
        """The two-sided p-value of Student's t-test."""
        if self.error < EQUAL:
            return float(abs(self.log_ratio) < EQUAL)
        from scipy.special import stdtr  # a slow import, but importing scipy.stats takes four times as long

        return float(2 * stdtr(self.freedom, -abs(self.log_ratio) / self.error))


class Noise:
    """The noise of one figure in the runs of a table, and the tests of the differences between its rows.

    All tests together report a false difference with probability ALPHA. If rows are compared with baselines, the tests against
    baselines use the fraction SHARE of ALPHA (Holm), and the tests of other pairs use the rest. Tests of other pairs are
    corrected for the number of other pairs (Bonferroni), because any other pair may contain the fastest row.
    """

    def __init__(
        self,
        rows: Mapping[Hashable, Values],
        pairs: Iterable[Pair] = (),
        looks: float = 1,
        errors: Mapping[Any, Sequence[float]] | None = None,
    ) -> None:
        """Take each row's values, keyed by row name. Skip values that are not positive. `pairs`: (row, baseline). `looks`:
        Bonferroni factor for repeated tests of the table during a sweep. `errors`: relative standard errors of values."""
        self.pairs, self.looks = tuple(pairs), looks
        self.rows = [{key: math.log(value) for key, value in row.items() if value > 0} for row in rows.values()]
        self.least = [fmean(error**2 for error in (errors or {}).get(name) or (0.0,)) for name in rows]
        """Lower limit of the variance between the runs of each row."""
        self.index = {name: i for i, name in enumerate(rows)}
        shared = Counter(key for row in self.rows for key in row)
        self.rounds = {key: i for i, key in enumerate(key for key, count in shared.items() if count > 1)}

    def runs(self, row: Hashable) -> int:
        """Return the number of values of a row."""
        return len(self.rows[self.index[row]])

    def p_value(self, row: Hashable, other: Hashable) -> float | None:
        """Return the p-value of the difference between two rows, adjusted for the number of tests; None if not tested."""
        for pair in ((row, other), (other, row)):
            if pair in self._tests.against:
                return self._tests.against[pair]
        difference = self.difference(row, other)
        return None if difference is None else min(1.0, self._tests.others * difference.p_value)

    def interval(self, row: Hashable, other: Hashable) -> tuple[float, float] | None:
        """Return the confidence interval, in percent, of a row's difference from its baseline; None if not tested."""
        difference = self.difference(row, other)
        if difference is None:
            return None
        half = _quantile(difference.freedom, 1 - ALPHA / (2 * self._tests.pairs)) * difference.error
        return _percent(difference.log_ratio - half), _percent(difference.log_ratio + half)

    @cached_property
    def _tests(self) -> _Tests:
        differences = [self.difference(*pair) for pair in self.pairs]
        able = sum(len(row) >= REPEATS for row in self.rows)
        pairs = sum(each is not None for each in differences)
        others = able * (able - 1) // 2 - pairs
        share = 0.0 if not pairs else SHARE if others else 1.0
        factor = self.looks / (share or 1)
        adjusted = holm((each and each.p_value for each in differences), factor)
        against = dict(zip(self.pairs, adjusted, strict=True))
        return _Tests(against, factor * pairs, self.looks * others / (1 - share or 1))

    def difference(self, row: Hashable, other: Hashable) -> Difference | None:
        """Return the difference between `row` and `other`, or None if the rows have too few runs for a test."""
        i, j = self.index[row], self.index[other]
        a, b = self.rows[i], self.rows[j]
        if len(a.keys() & b.keys()) >= REPEATS:
            return self._within_rounds(i, j)
        if min(len(a), len(b)) < REPEATS:
            return None
        # Welch's t-test: the runs share no rounds.
        one, other = variance(a.values()), variance(b.values())
        share_a, share_b = one / len(a), other / len(b)
        freedom = share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1)
        freedom = (share_a + share_b) ** 2 / freedom if freedom > 0 else 1.0
        error = max(one, self.least[i]) / len(a) + max(other, self.least[j]) / len(b)
        return Difference(fmean(a.values()) - fmean(b.values()), math.sqrt(error), freedom)

    def _within_rounds(self, i: int, j: int) -> Difference:
        fit = self._fit
        own = fit.cells[[i, j]] / fit.cells[[i, j]].sum(1, keepdims=True)
        contrast = own[0] - own[1]
        rounds = contrast @ fit.inverse @ contrast
        one, other = max(fit.variances[i], self.least[i]), max(fit.variances[j], self.least[j])
        square = one / fit.cells[i].sum() + other / fit.cells[j].sum() + (one + other) / 2 * rounds
        freedom = fit.freedom
        one, other = fit.variances[i], fit.variances[j]
        if fit.row_freedom < freedom and one + other > 0:  # Satterthwaite
            freedom = min(freedom, (one + other) ** 2 / (one**2 + other**2) * fit.row_freedom)
        return Difference(float(fit.effects[i] - fit.effects[j]), math.sqrt(square), float(freedom))

    @cached_property
    def _fit(self) -> _Fit:
        """Fit the effects of rows and rounds by least squares. Ignore rounds in which only one row has a run."""
        import numpy as np

        cells = np.zeros((len(self.rows), max(len(self.rounds), 1)))
        logs = np.zeros_like(cells)
        for i, row in enumerate(self.rows):
            for key in row.keys() & self.rounds.keys():
                cells[i, self.rounds[key]], logs[i, self.rounds[key]] = 1, row[key]
        runs = np.maximum(cells.sum(1), 1)
        normal = np.diag(cells.sum(0)) - cells.T @ (cells / runs[:, None])  # for the rounds, with rows eliminated
        inverse = np.linalg.pinv(normal, hermitian=True)
        means = logs.sum(1) / runs
        drift = inverse @ (logs.sum(0) - cells.T @ means)
        effects = means - cells @ drift / runs
        squares = (((logs - effects[:, None] - drift) * cells) ** 2).sum(1)
        used = cells.sum(1) > 0
        freedom = cells.sum() - used.sum() - np.linalg.matrix_rank(normal, hermitian=True)
        if freedom <= 0:
            return _Fit(cells, inverse, effects, squares, 0.0, 0.0)
        pooled = squares.sum() / freedom
        shares = freedom * np.maximum(runs - 1, 0) * used / ((runs - 1) * used).sum()  # degrees of freedom per row
        variances, row_freedom, several = np.full_like(squares, pooled), freedom, shares > 0
        if pooled > EQUAL**2 and several.sum() >= 3:
            own, share = squares[several] / shares[several] / pooled, shares[several]
            chance = (2 / share).mean()  # variance of `own` if all rows have the same variance
            spread = (((own - 1) ** 2).sum() / (several.sum() - 1) - chance) / (1 + chance)
            if spread > 0:
                prior = 2 / spread
                variances[several] *= (prior + share * own) / (prior + share)
                row_freedom = min(freedom, prior + share.mean())
        return _Fit(cells, inverse, effects, variances, freedom, row_freedom)

    def visible(self, times: int = 1) -> float | None:
        """Return the smallest difference in percent that a test detects with the probability POWER: the median over the tests.
        Return None if the median is infinite or nothing is tested. `times`: factor by which to multiply the number of repeats."""
        pairs, tests = self.pairs, self._tests.pairs
        if not pairs:  # the fastest row is compared with all others
            able = [name for name in self.index if self.runs(name) >= REPEATS]
            pairs, tests = tuple((row, able[0]) for row in able[1:]), self._tests.others
        tested = [each for pair in pairs if (each := self.difference(*pair)) is not None]
        if not tested:
            return None
        found = []
        for each in tested:
            freedom = each.freedom * times
            needed = _quantile(freedom, 1 - ALPHA / (2 * tests)) + _quantile(freedom, POWER)
            size = needed * each.error / math.sqrt(times)
            found.append(_percent(size) if size < 1 else math.inf)
        middle = median(found)
        return middle if middle < math.inf else None


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _quantile(freedom: float, probability: float) -> float:
    """Return the quantile of Student's t-distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


class _Tests(NamedTuple):
    """The tests of a table. A Bonferroni factor is a number of tests divided by the share of ALPHA for these tests."""

    against: dict[Pair, float | None]
    """The adjusted p-values for pairs of a row and its baseline."""
    pairs: float
    """Bonferroni factor for the confidence interval of a row's difference from its baseline."""
    others: float
    """Bonferroni factor for the p-value of any other pair of rows."""


class _Fit(NamedTuple):
    """The least-squares solution of the equations log(value) = combination + round + noise."""

    cells: Array
    """1 where a row has a run in a round, else 0: [rows, rounds]."""
    inverse: Array
    """Generalised inverse of the normal equations of the rounds: [rounds, rounds]."""
    effects: Array
    """Logarithm of the figure of each row, without the effects of rounds: [rows]."""
    variances: Array
    """Variance of the figure's logarithm between the runs of each row: [rows]."""
    freedom: float
    """Degrees of freedom of the pooled variance."""
    row_freedom: float
    """Degrees of freedom of one row's variance."""


def noise_of(figure: Figure, rows: Sequence[Row], pairs: Iterable[Pair]) -> Noise:
    """Return the noise of a figure in the completed runs of a table. `pairs`: (row, baseline), each as `Row.key`."""
    errors = {row.key: row.errors(figure) for row in rows}
    return Noise({row.key: row.by_round(figure) for row in rows}, pairs, _looks(rows), errors)


def _looks(rows: Sequence[Row]) -> float:
    """Return the Bonferroni factor for sweeps with `repeat=auto`, where each further round repeats all tests; otherwise 1. Half
    of ALPHA is for the tests after the last round, when the number of runs is largest. The other half is for earlier tests."""
    runs = [run for row in rows for run in row.runs if run.sweep.get("repeat") == "auto"]
    limits = [limit for run in runs if isinstance(limit := run.sweep.get("max_repeat"), int)]
    most = max(limits, default=REPEATS)
    last = any(run.state == "completed" and repeat_number(run.path.name) >= most for run in runs)
    return 1 if most <= REPEATS else 2 if last else 2 * (most - REPEATS)


def holm(p_values: Iterable[float | None], factor: float = 1.0) -> list[float | None]:
    """Adjust p-values for `factor` times the number of tests, so that ALPHA holds for all tests (Holm 1979). Leave None as is."""
    adjusted = list(p_values)
    known = sorted((p, i) for i, p in enumerate(adjusted) if p is not None)
    least = 0.0
    for rank, (p, i) in enumerate(known):
        least = max(least, min(1.0, factor * (len(known) - rank) * p))
        adjusted[i] = least
    return adjusted

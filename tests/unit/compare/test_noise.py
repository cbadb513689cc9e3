"""Tests of differences between rows: against figures of scipy and statsmodels, and simulated sweeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from meshrunner.runner.compare.noise import ALPHA, Noise, holm

Rows = list[dict[Any, float]]


def unpaired(*logs: tuple[float, ...]) -> Noise:
    return Noise({i: {(i, k): math.exp(each) for k, each in enumerate(row)} for i, row in enumerate(logs)})


def paired(*logs: tuple[float | None, ...], pairs: list[tuple[int, int]] | None = None) -> Noise:
    rows = {i: {k: math.exp(each) for k, each in enumerate(row) if each is not None} for i, row in enumerate(logs)}
    return Noise(rows, pairs or ())


def p_value(noise: Noise, i: int = 0, j: int = 1) -> float | None:
    found = noise.difference(i, j)
    return None if found is None else found.p_value


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # scipy 1.17.1: ttest_ind(a, b, equal_var=False).pvalue
        ((100.0, 101.0, 102.0), (103.0, 104.5, 107.0), 0.062212184747131395),
        ((5.0, 5.5, 6.0, 5.2), (7.0, 7.1, 9.5, 8.0, 7.7), 0.0032576966550333757),
        # Quantiles of Student's t: 2.776445 is the two-sided 5% one of 4 degrees of freedom, 4.302653 that of 2.
        ((0.0, 1.0, 2.0), tuple(i + 2.776445 * math.sqrt(2 / 3) for i in range(3)), 0.05),
        ((0.0, 1.0, 2.0), (1 + 4.302653 * math.sqrt(1 / 3),) * 3, 0.05),
        ((0.0, 1.0, 2.0), tuple(i + 0.740697 * math.sqrt(2 / 3) for i in range(3)), 0.5),
        ((1.0, 2.0, 3.0), (3.0, 2.0, 1.0), 1.0),
        ((5.0,) * 3, (5.0,) * 3, 1.0),
        ((5.0,) * 3, (6.0,) * 3, 0.0),
    ],
)
def test_runs_without_rounds_are_tested_by_welch(a: tuple[float, ...], b: tuple[float, ...], expected: float) -> None:
    noise = unpaired(a, b)
    assert p_value(noise) == pytest.approx(expected, rel=1e-5, abs=1e-9) == p_value(noise, 1, 0)


def test_two_rows_of_a_sweep_are_tested_in_pairs() -> None:
    a, b = (1.0, 1.3, 1.1, 1.6), (1.2, 1.55, 1.25, 1.86)
    assert p_value(paired(a, b)) == pytest.approx(
        0.003434247018839467, rel=1e-9
    )  # scipy 1.17.1: ttest_rel(a, b).pvalue


def test_complete_rounds_against_an_analysis_of_variance() -> None:
    """With equal noise: the residual variance by hand, from row and round means."""
    rows = np.array([[1.00, 1.05, 0.98], [1.11, 1.14, 1.08], [1.01, 1.08, 0.99], [0.92, 0.95, 0.89]])
    residuals = rows - rows.mean(0) - rows.mean(1, keepdims=True) + rows.mean()
    error = math.sqrt(2 * (residuals**2).sum() / 6 / 3)
    found = paired(*map(tuple, rows)).difference(1, 0)
    assert found is not None and found.log_ratio == pytest.approx(rows[1].mean() - rows[0].mean())
    assert found.error == pytest.approx(error) and found.freedom == 6


def test_missing_runs_against_regression() -> None:
    """A table with two gaps, against least squares with a column per row and per round."""
    generator = np.random.default_rng(0)
    logs = generator.normal(0, 0.02, (5, 6)) + generator.normal(0, 0.05, 6)
    present = np.ones_like(logs, dtype=bool)
    present[1, 2] = present[3, 5] = False
    design = [[float(i == a) for a in range(5)] + [float(k == b) for b in range(1, 6)] for i, k in np.argwhere(present)]
    x, y = np.array(design), logs[present]
    effects, squares, *_ = np.linalg.lstsq(x, y, rcond=None)
    contrast = np.array([0.0, 1, 0, -1, 0, *[0.0] * 5])
    found = paired(
        *(tuple(v if p else None for v, p in zip(*row, strict=True)) for row in zip(logs, present, strict=True))
    ).difference(1, 3)
    assert found is not None and found.log_ratio == pytest.approx(contrast @ effects)
    freedom = len(y) - 10
    assert found.freedom == freedom
    assert found.error**2 == pytest.approx(squares[0] / freedom * (contrast @ np.linalg.inv(x.T @ x) @ contrast))


def test_two_runs_are_too_few() -> None:
    assert p_value(unpaired((1.0, 2.0), (9.0, 9.1, 9.2))) is None
    assert p_value(paired((1.0, 2.0, None), (9.0, 9.1, 9.2))) is None


def test_a_drift_between_rounds_is_no_noise() -> None:
    slow = (0.0, -0.3, 0.2, -0.1)
    rows = [
        tuple(each + gain + noise for each, noise in zip(slow, wobble, strict=True))
        for gain, wobble in (
            (0.0, (0.001, -0.001, 0.0, 0.001)),
            (0.01, (0.0, 0.001, -0.001, 0.0)),
            (0.0, (-0.001, 0.0, 0.001, 0.0)),
        )
    ]
    assert (p_value(paired(*rows), 1, 0) or 1) < 1e-3 < 0.9 < (p_value(unpaired(*rows), 1, 0) or 0)


def test_identical_values_do_not_differ() -> None:
    noise = paired((1.0,) * 3, (1.0,) * 3, (2.0,) * 3)
    assert p_value(noise, 0, 1) == 1 and p_value(noise, 0, 2) == 0


@pytest.mark.parametrize("shared", [True, False])
def test_runs_that_agree_by_chance_are_no_more_exact_than_their_steps(shared: bool) -> None:
    logs = {"a": (0.0, 0.0101, 0.0199), "b": (0.004, 0.014, 0.024)} if shared else {"a": (0.0,) * 3, "b": (0.004,) * 3}
    rows = {name: {k if shared else (name, k): math.exp(each) for k, each in enumerate(logs[name])} for name in "ab"}
    errors = {"a": [0.003, 0.005, 0.004], "b": [0.004]}
    without, found = Noise(rows).difference("b", "a"), Noise(rows, errors=errors).difference("b", "a")
    assert without is not None and found is not None and without.p_value < 0.01 and found.log_ratio == without.log_ratio
    assert found.error == pytest.approx(math.sqrt((0.0000166667 + 0.000016) / 3), rel=1e-4)
    assert found.p_value > 0.2


@pytest.mark.parametrize("shared", [True, False])
def test_a_lower_bound_of_the_noise_lowers_no_p_value(shared: bool) -> None:
    """A noisy row and two that agree by chance, and that have, as their steps show, the same noise."""
    generator = np.random.default_rng(1)
    for _ in range(50):
        logs = generator.normal(0, [[0.02], [1e-6], [1e-6]], (3, 3)) + np.array([[0.0], [0.04], [0.02]])
        rows = {
            i: {k if shared else (i, k): math.exp(each) for k, each in enumerate(row)} for i, row in enumerate(logs)
        }
        without, bounded = Noise(rows), Noise(rows, errors={key: [0.02] for key in range(3)})
        for pair in ((1, 0), (2, 0), (2, 1)):
            assert (bounded.p_value(*pair) or 0) >= (without.p_value(*pair) or 0) - 1e-12


def test_holm() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06], nan_ok=True)
    assert holm([]) == []


def simulated(
    generator: np.random.Generator, rows: int, rounds: int, noise: float, drift: float, unequal: float, gain: float = 0
) -> Noise:
    """
    Noise of a sweep's speeds. Each row but the first is compared with the first.

    The standard deviations of rows spread log-uniformly over a factor of `unequal`. `gain`: advantage of the last row.
    """
    deviations = noise * np.exp(generator.uniform(-0.5, 0.5, rows) * math.log(unequal))
    logs = generator.normal(0, 1, (rows, rounds)) * deviations[:, None] + generator.normal(0, drift, rounds)
    logs[-1] += gain
    return paired(*map(tuple, logs), pairs=[(i, 0) for i in range(1, rows)])


def tells(noise: Noise, i: int, j: int) -> bool:
    p = noise.p_value(i, j)
    return p is not None and p < ALPHA


def differing(noise: Noise, rows: int) -> list[bool]:
    """Whether each row but the first is told from the first."""
    return [tells(noise, i, 0) for i in range(1, rows)]


def told_from_the_fastest(noise: Noise, rows: int) -> list[bool]:
    """Whether a test separates each row from the fastest row."""
    fastest = max(range(rows), key=lambda i: getattr(noise.difference(i, 0), "log_ratio", 0.0))
    return [tells(noise, i, fastest) for i in range(rows) if i != fastest]


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [1, 3])
@pytest.mark.parametrize("drift", [0, 0.05])
@pytest.mark.parametrize(("rows", "rounds"), [(2, 3), (4, 3), (12, 3), (40, 3), (12, 5)])
def test_false_alarms_in_simulated_sweeps(rows: int, rounds: int, drift: float, unequal: float) -> None:
    """At most 6% of 2,000 tables without a difference tell a row from its baseline or from the fastest row."""
    generator = np.random.default_rng(rows)
    tables = (simulated(generator, rows, rounds, 0.02, drift, unequal) for _ in range(2000))
    assert sum(any(differing(noise, rows) + told_from_the_fastest(noise, rows)) for noise in tables) <= 120


@pytest.mark.parametrize(("rows", "rounds", "noise", "gain"), [(4, 3, 0.02, 0.1), (12, 5, 0.01, 0.03)])
def test_power_in_simulated_sweeps(rows: int, rounds: int, noise: float, gain: float) -> None:
    """Of 400 tables in which the last row differs, at least 90% report it."""
    generator = np.random.default_rng(2)
    tables = (simulated(generator, rows, rounds, noise, 0.05, 1, gain) for _ in range(400))
    assert sum(differing(table, rows)[-1] for table in tables) >= 360


def test_the_smallest_visible_difference_is_found_in_nine_of_ten_tables() -> None:
    generator = np.random.default_rng(3)
    visible = np.median([simulated(generator, 4, 3, 0.02, 0.05, 1).visible() or 0 for _ in range(200)])
    tables = (simulated(generator, 4, 3, 0.02, 0.05, 1, math.log1p(visible / 100)) for _ in range(400))
    assert 0.8 < sum(differing(table, 4)[-1] for table in tables) / 400 < 0.99


def after_more_rounds(generator: np.random.Generator, rows: int, unequal: float, gain: float = 0) -> list[bool]:
    """`differing` at the end of a sweep with repeat=auto, which repeats the baseline and the rows not yet told from it."""
    deviations = 0.02 * np.exp(generator.uniform(-0.5, 0.5, rows) * math.log(unequal))
    logs = generator.normal(0, 1, (rows, 8)) * deviations[:, None] + generator.normal(0, 0.05, 8)
    logs[-1] += gain
    values = {i: {k: math.exp(logs[i, k]) for k in range(3)} for i in range(rows)}
    for k in range(3, 9):
        noise = Noise(values, [(i, 0) for i in range(1, rows)], looks=2 if k == 8 else 10)
        found = differing(noise, rows)
        if k == 8 or all(found):
            break
        for i in (0, *(i for i, differs in enumerate(found, 1) if not differs)):
            values[i][k] = math.exp(logs[i, k])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [1, 3])
@pytest.mark.parametrize("rows", [2, 4, 12, 40])
def test_false_alarms_of_automatic_repeats(rows: int, unequal: float) -> None:
    generator = np.random.default_rng(rows)
    assert sum(any(after_more_rounds(generator, rows, unequal)) for _ in range(1000)) <= 60


@pytest.mark.parametrize(("rows", "gain"), [(2, 0.04), (4, 0.04)])
def test_power_of_automatic_repeats(rows: int, gain: float) -> None:
    """Repeats find a difference of 4% beside noise of 2%, which three rounds rarely show."""
    generator = np.random.default_rng(4)
    three = sum(differing(simulated(generator, rows, 3, 0.02, 0.05, 1, gain), rows)[-1] for _ in range(400))
    assert three < 150 and sum(after_more_rounds(generator, rows, 1, gain)[-1] for _ in range(400)) > 300

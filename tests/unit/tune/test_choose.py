"""The choice of runs, on simulated devices whose constants and options differ from what predictions assume."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bench.tune import BUDGET, NOISE, TOLERANCE, search
from meshrunner.runner.tune.belief import Array, Belief, Measured, Prior, Response
from meshrunner.runner.tune.choose import next_wave, outlook
from tests.unit.tune.recorded import RECORDED, read

LAYOUTS = ("a", "b", "c", "d")
COMBINATIONS = [
    dict(zip(("parallelism", "recompute", "compile", "micro_batch", "reshard"), options, strict=True))
    for options in product(LAYOUTS, ("none", "selective", "full"), ("eager", "per_block"), "124", ("always", "never"))
]
CONSTANTS = 5
KNOWN_TO = 0.18
REPLAYS = 200


def speeds(constants: Array) -> Array:
    """Return the logarithms of the speeds of all combinations [combinations, points], on devices with `constants` [points, 5]."""
    matmul, memory, attention, contention, host = np.exp(constants).T
    found = []
    for each in COMBINATIONS:
        layout, batch = LAYOUTS.index(each["parallelism"]), int(each["micro_batch"])
        again = {"none": 0.0, "selective": 0.1, "full": 0.3}[each["recompute"]]
        compute = (1 + again + 0.02 * layout) / matmul + 0.3 * (1 + again) / attention
        compute = compute + (0.35 if each["compile"] == "per_block" else 0.56) / memory
        communication = (0.9 - 0.15 * layout) / batch * (1 if each["reshard"] == "always" else 0.67)
        issued = (0.3 if each["compile"] == "per_block" else 0.5) * 2.5 / batch * host
        step = np.maximum(compute + 0.15 * communication * contention, 1.1 * communication)
        found.append(-np.log(np.maximum(step, issued) + 0.02))
    return np.array(found)


def prior() -> Prior:
    points = np.random.default_rng(0).normal(0, KNOWN_TO, (40, CONSTANTS))
    return Prior(Response(points, speeds(points)), np.full(CONSTANTS, KNOWN_TO), COMBINATIONS)


def test_a_twelfth_of_the_runs_finds_a_combination_near_the_fastest() -> None:
    generator = np.random.default_rng(1)
    behind, holds = [], []
    for _ in range(20):
        truth = speeds(np.log(generator.uniform(0.7, 1.3, (1, CONSTANTS))))[:, 0]
        slower = generator.choice(LAYOUTS)
        truth -= math.log(1.1) * np.array([each["parallelism"] == slower for each in COMBINATIONS])
        regret, bound, runs = search(prior(), truth, generator)
        assert runs <= BUDGET
        behind.append(regret)
        holds.append(regret <= bound)
    assert sum(regret <= TOLERANCE for regret in behind) >= 19 and sum(holds) >= 19, behind


@pytest.mark.parametrize("recorded", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_a_quarter_of_the_runs_finds_a_combination_near_the_fastest_that_was_measured(recorded: Path) -> None:
    before, truth = read(recorded)
    found = [search(before, truth, np.random.default_rng(seed), len(truth) // 4) for seed in range(REPLAYS)]
    assert sum(regret <= TOLERANCE for regret, _, _ in found) >= 0.95 * REPLAYS, found
    assert sum(regret <= bound for regret, bound, _ in found) >= 0.95 * REPLAYS, found
    assert all(runs <= len(truth) // 4 for _, _, runs in found)


def test_nothing_is_left_to_find_where_all_errors_are_small() -> None:
    truth = speeds(np.zeros((1, CONSTANTS)))[:, 0]
    belief = Belief(truth, 1e-6 * np.eye(len(truth)), np.zeros(CONSTANTS))
    fastest, slow = int(truth.argmax()), int(truth.argmin())
    found = outlook(belief, {fastest, slow}, TOLERANCE, seed=0)
    assert found == (fastest, 0.0, pytest.approx(0.0, abs=0.005))
    found = outlook(belief, {slow}, TOLERANCE, seed=0)
    assert found == (slow, 1.0, pytest.approx(math.expm1(truth.max() - truth.min()), rel=0.02))


def test_a_wave_has_no_combination_twice_and_prefers_the_promising() -> None:
    belief = prior().after([], NOISE)
    chosen = next_wave(belief, (), 5, NOISE)
    assert len(set(chosen)) == 5 and (belief.mean[chosen] > np.median(belief.mean)).all()
    assert chosen[0] == belief.mean.argmax()


def test_a_response_is_exact_for_quadratic_predictions() -> None:
    generator = np.random.default_rng(2)
    points = generator.normal(0, 1, (40, 3))
    matrix, line = generator.normal(0, 1, (3, 3)), generator.normal(0, 1, 3)

    def predicted(x: Array) -> float:
        return float(2 + line @ x + x @ matrix @ x)

    response = Response(points, np.array([[predicted(each) for each in points]]))
    x, step = np.array([0.3, -0.2, 0.5]), 1e-6
    value, slopes = response.at(x)
    assert value[0] == pytest.approx(predicted(x)) and response.misfit[0] < 1e-9
    for i in range(3):
        ahead = x.copy()
        ahead[i] += step
        assert slopes[0, i] == pytest.approx((predicted(ahead) - predicted(x)) / step, rel=1e-4)


def test_a_run_moves_the_constants_and_its_relatives() -> None:
    before = prior()
    nothing = before.after([], NOISE)
    truth = speeds(np.array([[-0.3, 0, 0, 0, 0]]))[:, 0]
    after = before.after([Measured(i, truth[i], 1) for i in (5, 40, 77, 100)], NOISE)
    assert after.constants[0] < -0.1 and not nothing.constants.any()
    assert np.abs(after.mean - truth).mean() < np.abs(nothing.mean - truth).mean() / 3
    assert (after.covariance.diagonal() < nothing.covariance.diagonal()).all()

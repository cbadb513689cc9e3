"""The referee of `meshrunner bisect` repeats runs until noise no longer decides."""

from pathlib import Path
from random import Random

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.bisect import referee
from meshrunner.runner.bisect.referee import Referee, Variant

GOOD, BAD = Variant("good", []), Variant("bad", [])


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Replace runs by random figures: `values` with relative normal noise."""

    def build(values: dict[str, float | None], noise: float, seed: int = 0, most: int = 30) -> Referee:
        random = Random(seed)

        def measure(self: Referee, variant: Variant) -> float | None:
            self.runs += 1
            value = values[variant.name]
            return None if value is None else value * (1 + random.gauss(0, noise))

        monkeypatch.setattr(Referee, "_measure", measure)
        return Referee(GOOD, BAD, by="speed", most=most, folder=tmp_path)

    return build


def test_exact_figures_need_one_run_each(noisy) -> None:
    judge = noisy({"good": 1.0, "bad": 1.0 + 1e-12, "a": 1.0, "b": 1.0 + 1e-12}, 0)
    before = judge.runs
    assert (judge.is_bad(Variant("a", [])), judge.is_bad(Variant("b", []))) == (False, True)
    assert (before, judge.runs) == (2 * referee.FEWEST, before + 2)


@pytest.mark.parametrize("bad", [0.96, 1.04])
def test_a_difference_of_four_percent_is_decided_despite_noise(noisy, bad: float) -> None:
    wrong = 0
    for seed in range(50):
        judge = noisy({"good": 1.0, "bad": bad, "a": 1.0, "b": bad}, 0.01, seed)
        wrong += judge.is_bad(Variant("a", [])) is not False
        wrong += judge.is_bad(Variant("b", [])) is not True
    assert wrong == 0


def test_more_noise_takes_more_runs(noisy) -> None:
    runs = []
    for noise in (0.005, 0.02):
        judge = noisy({"good": 1.0, "bad": 0.95, "a": 1.0}, noise, seed=3)
        judge.is_bad(Variant("a", []))
        runs.append(judge.runs)
    assert runs[1] > runs[0]


def test_ends_that_do_not_differ_are_refused(noisy) -> None:
    with pytest.raises(ConfigError, match="do not differ beyond noise after 5 rounds"):
        noisy({"good": 1.0, "bad": 1.0}, 0.02, most=5)
    with pytest.raises(ConfigError, match="do not differ beyond noise after 4 rounds"):
        noisy({"good": 1.0, "bad": 1.0}, 0.0, most=4)


def test_variant_that_cannot_run_is_skipped_but_an_end_is_refused(noisy) -> None:
    assert noisy({"good": 1.0, "bad": 2.0, "a": None}, 0.01).is_bad(Variant("a", [])) is None
    with pytest.raises(ConfigError, match="bad cannot run"):
        noisy({"good": 1.0, "bad": None}, 0.01)

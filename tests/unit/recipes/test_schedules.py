"""Learning-rate schedules at their ends and corners."""

from __future__ import annotations

import pytest

from meshrunner.recipes.optim.lr_schedule import SHIPPED_WARMUP, WSD, Constant, WarmupCosine, WarmupLinear
from tests.composed import option

SHAPE = {"total_steps": 100, "warmup_steps": 10, "final": 0.1}


def test_constant_is_one() -> None:
    assert {Constant(kind="constant").factor(step) for step in (1, 50, 1000)} == {1.0}


def test_constant_rate_follows_warm_up() -> None:
    schedule = Constant(kind="constant", warmup_steps=4)
    assert [schedule.factor(step) for step in (1, 2, 3, 4, 5, 1000)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("cls", [WarmupLinear, WarmupCosine, WSD])
def test_rate_rises_peaks_and_ends_at_final(cls: type[WarmupLinear] | type[WarmupCosine] | type[WSD]) -> None:
    schedule = cls(kind="x", **SHAPE, **({"decay": 0.2} if cls is WSD else {}))
    assert schedule.factor(1) == pytest.approx(0.1)
    assert schedule.factor(5) == pytest.approx(0.5)
    assert schedule.factor(10) == 1.0
    assert schedule.factor(100) == pytest.approx(0.1)
    assert schedule.factor(500) == pytest.approx(0.1)
    after = [schedule.factor(step) for step in range(10, 101)]
    assert after == sorted(after, reverse=True)


def test_schedules_differ_in_the_middle() -> None:
    linear = WarmupLinear(kind="x", **SHAPE)
    cosine = WarmupCosine(kind="x", **SHAPE)
    wsd = WSD(kind="x", **SHAPE, decay=0.2)
    assert linear.factor(55) == pytest.approx(0.55)
    assert cosine.factor(55) == pytest.approx(0.55)
    assert cosine.factor(20) > linear.factor(20)
    assert wsd.factor(81) == 1.0
    assert wsd.factor(91) == pytest.approx(0.55)


def test_decay_starts_at_once_without_warm_up() -> None:
    assert WarmupLinear(kind="x", total_steps=10, warmup_steps=0, final=0.0).factor(1) == pytest.approx(0.9)


def test_only_the_shipped_warm_up_goes_without_a_remark() -> None:
    assert option("lr_schedule", "constant")["warmup_steps"] == SHIPPED_WARMUP

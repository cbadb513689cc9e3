"""The history of losses and gradient norms decides like a plain Python list does."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev

import pytest
import torch
import torch.distributed as dist

from meshrunner.recipes.optim.outliers import ENOUGH, LENGTH, Outliers

DEVIATIONS = 4.0


def test_outliers_are_those_of_a_plain_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The course is longer than the history, drifts, and has spikes and values that are not finite, some of them early."""
    monkeypatch.setattr(dist, "all_reduce", lambda step: step.mul_(2))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    draw, outliers = random.Random(3), Outliers(DEVIATIONS, torch.device("cpu"))
    kept: list[tuple[float, float]] = []
    skipped = []
    for number in range(3 * LENGTH):
        step = [draw.gauss(6 - number / 100, 0.1), draw.gauss(1, 0.05)]
        if number in (3, 40, 41, 150):
            step[number % 2] += 3.0
        if number in (5, 60):
            step[0] = math.nan
        recent = list(zip(*kept[-LENGTH:], strict=True))
        bounds = [fmean(values) + DEVIATIONS * pstdev(values) for values in recent]
        expected = len(kept) >= ENOUGH and any(value > bound for value, bound in zip(step, bounds, strict=True))
        found = bool(outliers.is_outlier(*map(torch.tensor, step)))
        assert found == expected, number
        if found:
            skipped.append(number)
        elif all(map(math.isfinite, step)):
            kept.append((step[0], step[1]))
    assert {40, 41, 150} <= set(skipped) and 3 not in skipped and len(skipped) < 8
    assert outliers.count == len(kept) > 2 * LENGTH

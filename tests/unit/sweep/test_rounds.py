"""The order in which a sweep executes its runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from meshrunner.runner.sweep.combinations import SweepBatch


def order(rows: int, repeats: int, how: str = "shuffled", seed: int = 0) -> list[tuple[int, int]]:
    """(combination, repeat) of each run."""
    experiment = SimpleNamespace(seed=seed, sweep=SimpleNamespace(order=how))
    combinations: Any = [
        SimpleNamespace(experiment=experiment, runs=[(row, repeat) for repeat in range(repeats)]) for row in range(rows)
    ]
    return [cast("tuple[int, int]", run) for _, run in SweepBatch(Path(), combinations).ordered]


def test_a_round_runs_every_combination_once_in_an_order_of_its_own() -> None:
    runs = order(8, 4)
    rounds = [runs[8 * i : 8 * i + 8] for i in range(4)]
    assert [sorted(each) for each in rounds] == [[(row, i) for row in range(8)] for i in range(4)]
    assert len({tuple(row for row, _ in each) for each in rounds}) == 4
    assert runs == order(8, 4) != order(8, 4, seed=1), "the seed determines the order"


def test_a_single_round_has_the_order_of_the_command_line() -> None:
    assert order(8, 1) == [(row, 0) for row in range(8)]
    assert order(3, 2, "as_given") == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]

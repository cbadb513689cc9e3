"""The order in which a sweep executes its runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshrunner.runner.compare.comparison import compare_runs, compare_sweep
from meshrunner.runner.compare.findings import undecided
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.rundir import place_again, run_names, varying_overrides
from meshrunner.runner.sweep.combinations import SweepBatch
from meshrunner.runner.sweep.rounds import _place_round
from tests.run_dirs import make_run, write


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


@pytest.fixture
def auto(tmp_path: Path) -> Path:
    """A sweep with repeat=auto after three rounds. The first two combinations are equal within noise, the third is slower."""
    sweep = tmp_path / "sweep"
    names = []
    for i, wps in enumerate((100.0, 101.0, 50.0)):
        for n in (1, 2, 3):
            names.append(f"00{i}_tensor-{i}_repeat-{n}")
            setting = ("sweep.repeat=auto", "sweep.max_repeat=8", f"parallelism.prefetch={i}")
            make_run(sweep / names[-1], *setting, wps=wps + (i + n) % 3)
    write(sweep / "sweep.json", {"jobs": [{"name": name, "overrides": [name[4:12]]} for name in names]})
    return sweep


FIRST: Any = SimpleNamespace(seed=0, sweep=SimpleNamespace(max_repeat=8))


def test_a_further_round_repeats_what_is_not_decided(auto: Path) -> None:
    placed = _place_round(auto, FIRST)
    assert {run.name for run in placed} == {"000_tensor-0_repeat-4", "001_tensor-1_repeat-4"}
    assert run_names(auto)[9:] == [run.name for run in placed]
    assert varying_overrides(auto)["000_tensor-0_repeat-4"] == ["tensor-0"]


def test_a_row_is_repeated_after_one_failed_run_but_not_after_two(auto: Path) -> None:
    for repeat, expected in ((3, {"000", "001"}), (2, set())):
        status = auto / f"001_tensor-1_repeat-{repeat}" / "status.json"
        write(status, {"state": "failed", "reason": "", "attempt": 1})
        assert {row.runs[0].path.name[:3] for row in undecided(compare_sweep(auto)[0])} == expected


def test_a_baseline_with_one_failed_run_is_repeated_with_its_rows(auto: Path) -> None:
    write(auto / "000_tensor-0_repeat-1" / "status.json", {"state": "failed", "reason": "", "attempt": 1})
    comparison = compare_runs(read_runs([auto]), "parallelism.prefetch=0")
    assert {row.runs[0].path.name[:3] for row in undecided(comparison)} == {"000", "001", "002"}


def test_rows_without_a_speed_are_not_repeated(auto: Path) -> None:
    for run in auto.glob("001*"):
        write(run / "summary.json", {"state": "completed", "perf/wps_median": None})
    for baseline in (None, "parallelism.prefetch=0"):
        assert undecided(compare_runs(read_runs([auto]), baseline)) == []


def test_a_round_that_was_written_in_part_is_finished_first(auto: Path) -> None:
    place_again(auto / "001_tensor-1_repeat-1", auto / "001_tensor-1_repeat-4")
    assert [run.name for run in _place_round(auto, FIRST)] == ["001_tensor-1_repeat-4"]
    assert run_names(auto)[9:] == ["001_tensor-1_repeat-4"]


def test_no_round_follows_in_a_damaged_sweep(auto: Path) -> None:
    damaged = (auto / "sweep.json").read_bytes()[:-9]
    (auto / "sweep.json").write_bytes(damaged)
    assert _place_round(auto, FIRST) == [] and (auto / "sweep.json").read_bytes() == damaged

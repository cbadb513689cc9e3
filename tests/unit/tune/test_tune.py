"""`hydra/sweeper=tune` on a simulated machine: all of it but predictions and execution is real."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.compare.runs import glance
from meshrunner.runner.config.compose import Composer
from meshrunner.runner.rundir import repeat_number, run_names
from meshrunner.runner.rundir.run import read_config
from meshrunner.runner.sweep import combinations, hydra_launchers
from meshrunner.runner.sweep.combinations import SweepBatch
from meshrunner.runner.tune import answer, search, survey, sweeper
from tests.unit.tune.machine import GRID, LAYOUTS, Machine, Work

FIXED = ("hardware=h100_80gb", "launch.workers=8", "tracker=none", "global_batch=64", "hydra.sweep.dir=sweep")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


COMPOSED: dict[str, SweepBatch] = {}


def check_batch(loader: Any, config: DictConfig, overrides: list[list[str]], *rest: Any) -> SweepBatch:
    key = str(overrides)
    COMPOSED[key] = COMPOSED.get(key) or combinations.check_batch(loader, config, overrides, *rest)
    return COMPOSED[key]


@pytest.fixture(autouse=True)
def folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sweep directory. All tests use the same one, so that combinations are composed once."""
    monkeypatch.chdir(place)
    shutil.rmtree(place / "sweep", ignore_errors=True)
    monkeypatch.setattr(survey, "check_batch", check_batch)
    monkeypatch.setattr(sweeper, "workers_of_sweep", lambda experiment: 8)
    monkeypatch.setattr(hydra_launchers, "finish_sweep", lambda sweep_dir: None)

    def not_fitted(folders: list[Path]) -> Any:
        raise ConfigError("nothing was traced")

    monkeypatch.setattr(answer, "calibrate_device", not_fitted)
    return place / "sweep"


def tune(machine: Machine, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    monkeypatch.setattr(survey, "predict_all", machine.predict_all)
    monkeypatch.setattr(sweeper, "execute_all", machine.execute_all)
    given = {each.partition("=")[0]: each for each in (*FIXED, *GRID, *overrides)}
    return hydra_launchers.run_sweep(Composer("tune", ["-m", "hydra/sweeper=tune", *given.values()]))


def best(folder: Path, name: str = "best") -> Work:
    """The combination that the command recommends."""
    found = yaml.safe_load((folder / "experiment" / f"{name}.yaml").read_text())
    chosen = {key.removeprefix("override /"): value for each in found["defaults"] for key, value in each.items()}
    return Work(
        chosen.get("parallelism", "fsdp2"),
        chosen.get("activation_checkpoint", "none"),
        chosen.get("compile", "eager") != "eager",
        found.get("micro_batch", 4),
    )


def behind(machine: Machine, work: Work, batches: tuple[int, ...] = (2, 4)) -> float:
    """How much faster the fastest combination is, as a fraction."""
    every = [
        Work(layout, recompute, compiled, batch)
        for layout in LAYOUTS
        for recompute in ("none", "full")
        for compiled in (False, True)
        for batch in batches
    ]
    possible = [
        each for each in every if machine.outcome(each) == "completed" and machine.gib(each) <= machine.limit_gib
    ]
    return math.expm1(max(map(machine.truth, possible)) - machine.truth(work))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(1, 13)]
)
def test_the_answer_is_near_the_fastest(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(seed)
    assert tune(machine, monkeypatch) == 0
    assert behind(machine, best(folder)) <= 0.02
    said = capsys.readouterr().out
    assert "24 combinations: 0 impossible, 0 do not fit, 24 left; predicted best: " in said
    assert len({name.rpartition("_repeat")[0] for name in machine.executed}) <= 12
    assert "meshrunner run --config-dir sweep experiment=best" in said


@pytest.mark.slow
def test_half_the_true_matmul_rate_does_not_mislead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(4)
    machine.constants[0, 0] = math.log(2.0)
    tune(machine, monkeypatch)
    assert behind(machine, best(folder)) <= 0.02


@pytest.mark.slow(sampled=True)
def test_a_tune_that_was_killed_continues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(5)
    for number in (0, 1, 3, 4, 9, 14):
        machine.stop_after = number
        with pytest.raises(KeyboardInterrupt):
            tune(machine, monkeypatch)
    machine.stop_after = None
    predicted = machine.predicted
    assert cli._dispatch(["resume", "sweep"]) == 0
    assert machine.predicted == predicted, "predictions are kept"
    assert len(machine.executed) == len(set(machine.executed)) == len(run_names(folder))
    assert behind(machine, best(folder)) <= 0.02
    before = list(machine.executed)
    assert cli._dispatch(["resume", "sweep"]) == 0
    assert machine.executed == before


@pytest.mark.parametrize(("limit", "most"), [(40, 4), (30, 7)])
def test_out_of_memory_rules_out_what_needs_more(
    limit: int, most: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above 40 GiB, only runs of the first wave fail. Above 30 GiB, all 12 runs of the search would fail without the rule."""
    machine = Machine(6)
    machine.outcome = lambda work: "oom" if machine.gib(work) > limit else "completed"
    tune(machine, monkeypatch)
    failed = [glance(folder / name) for name in run_names(folder)]
    assert 1 <= sum(run.state == "oom" for run in failed) <= most
    assert machine.gib(best(folder)) <= limit and behind(machine, best(folder)) <= 0.02
    assert ": oom" in capsys.readouterr().out


@pytest.mark.slow
def test_a_layout_that_hangs_is_named_and_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(7)
    machine.outcome = lambda work: "timeout" if work.layout == "ddp" and work.batch == 4 else "completed"
    tune(machine, monkeypatch)
    assert behind(machine, best(folder)) <= 0.02
    assert "no speed measured for ddp none per_block micro_batch=4: timeout" in capsys.readouterr().out


def test_combinations_that_do_not_fit_never_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(8, limit_gib=35)
    tune(machine, monkeypatch)
    assert "24 combinations: 0 impossible, 12 do not fit, 12 left" in capsys.readouterr().out
    assert behind(machine, best(folder)) <= 0.02


@pytest.mark.parametrize(("step", "largest_gib"), [(0.08, 32.0), (0.3, 40.0)])
def test_a_completed_run_near_the_limit_moves_the_margin(
    step: float, largest_gib: float, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro batch 4 with recomputation needs 32 GiB and fits. Micro batch 2 without recomputation needs 40 GiB."""
    machine = Machine(8, limit_gib=38)
    monkeypatch.setattr(search, "STEP", {"cuda": step})
    tune(machine, monkeypatch)
    assert max(machine.gib(Work.of(read_config(folder / name))) for name in run_names(folder)) == largest_gib
    assert machine.gib(best(folder)) == largest_gib
    assert "24 combinations: 0 impossible, 12 do not fit, 12 left" in capsys.readouterr().out


def test_out_of_memory_near_the_limit_rules_out_no_measured_combination(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro batch 2 without recomputation is predicted not to fit, and runs out of memory although larger runs complete."""
    machine = Machine(8, limit_gib=38)
    monkeypatch.setattr(search, "STEP", {"cuda": 0.3})
    monkeypatch.setattr(machine, "gib", lambda work: 30.0 if work.batch == 2 and work.recompute == "none" else 32.0)
    monkeypatch.setattr(machine, "fits", lambda work: machine.gib(work) > 30)
    machine.outcome = lambda work: "completed" if machine.fits(work) else "oom"
    tune(machine, monkeypatch)
    assert machine.fits(best(folder))


@pytest.mark.slow
def test_what_is_left_out_gets_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(8)
    machine.unpredicted = lambda work: "no shape\nof a tensor" if work.layout == "ddp" else ""
    tune(machine, monkeypatch, "sweep.exclude=[parallelism=fsdp1 micro_batch=2]", "tune.runs=2", "sweep.max_repeat=3")
    said = capsys.readouterr().out
    assert "24 combinations: 4 impossible, 0 do not fit, 8 cannot be predicted, 12 left; predicted best: " in said
    assert "  8 x no shape of a tensor\n  4 x sweep.exclude" in said


@pytest.mark.slow
def test_each_cell_has_its_own_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(3)
    tune(machine, monkeypatch, "sweep.best_by=[micro_batch]", "sweep.max_repeat=3")
    said = capsys.readouterr().out
    assert said.count("No combination of this cell is ") == 2 and said.count(" of 12 were run.") == 2
    for number, batch in enumerate((2, 4), 1):
        found = best(folder, f"best_{number}")
        assert found.batch == batch and behind(machine, found, (batch,)) <= 0.02
        assert f"experiment=best_{number}" in said
    waves = [repeat_number(name) for name in run_names(folder)]
    cells = {
        wave: {name.partition("micro-batch-")[2][0] for name in run_names(folder) if repeat_number(name) == wave}
        for wave in waves
    }
    assert all(len(batches) == 1 for batches in cells.values()), "a wave belongs to one cell"


@pytest.mark.slow
def test_a_budget_that_ends_early_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(9)
    tune(machine, monkeypatch, "tune.runs=2", "sweep.max_repeat=3")
    said = capsys.readouterr().out
    assert "The search has used its budget. With a probability of " in said
    assert "To continue, raise tune.runs or tune.minutes: meshrunner tune " in said
    few = len({name.rpartition("_repeat")[0] for name in machine.executed})
    assert few == 2
    tune(machine, monkeypatch, "tune.runs=20")
    assert len({name.rpartition("_repeat")[0] for name in machine.executed}) > few
    assert behind(machine, best(folder)) <= 0.02


@pytest.mark.slow
def test_minutes_end_the_search(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(9)
    tune(machine, monkeypatch, "tune.minutes=4", "sweep.max_repeat=3")
    assert len({name.rpartition("_repeat")[0] for name in machine.executed}) == 4, "a run takes a minute"


@pytest.mark.slow
def test_the_global_batch_is_the_same_everywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(Machine(10), monkeypatch, "global_batch=null", "tune.runs=4", "sweep.max_repeat=3")
    configs = [yaml.safe_load((folder / name / "config.yaml").read_text()) for name in run_names(folder)]
    assert {config["global_batch"] for config in configs} == {32}
    assert {config["steps"] for config in configs} == {15}


def test_batches_without_a_common_multiple_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        tune(Machine(10), monkeypatch, "global_batch=null", "micro_batch=3,5,7", "parallelism=fsdp2")
    assert str(caught.value) == (
        "global_batch: tune compares only combinations with the same global batch. The combinations have 24, 40, 56 "
        "sequences per step, and the least common multiple of these numbers, 840, is too large. Set global_batch, or "
        "vary fewer values"
    )


@pytest.mark.slow
def test_a_directory_of_another_sweep_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(Machine(11), monkeypatch, "tune.runs=2", "sweep.max_repeat=3")
    with pytest.raises(ConfigError, match="holds runs of another sweep, such as "):
        tune(Machine(11), monkeypatch, "micro_batch=8")
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        tune(Machine(11), monkeypatch, "tune.steps=20")


@pytest.mark.slow
def test_the_best_experiment_is_the_run_with_the_users_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(Machine(12), monkeypatch, "steps=100", "+launch.env.A=1", "tune.runs=2", "sweep.max_repeat=3")
    composed = Composer("run", ["--config-dir=sweep", "experiment=best"]).single_run()
    assert composed is not None
    assert composed.config["steps"] == 100 and composed.config["launch"]["env"] == {"A": 1}
    assert composed.config["global_batch"] == 64 and composed.config["sweep"]["repeat"] == 1
    run = yaml.safe_load((folder / run_names(folder)[0] / "config.yaml").read_text())
    assert composed.config.keys() == run.keys()

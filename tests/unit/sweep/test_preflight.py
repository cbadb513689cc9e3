"""Runs that are predicted before they start, and warnings about missing predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.compare.cells import columns as table
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.export import as_csv, as_json
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.config.compose import Composer, grid
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.experiment import check
from meshrunner.runner.predict import NOT_IN_TIME, Forecast, Verdict, not_planned
from meshrunner.runner.rundir.records import PlanRecord
from meshrunner.runner.rundir.summary import predicted
from meshrunner.runner.sweep import preflight
from meshrunner.runner.sweep.preflight import does_not_fit, predict_single_run, predicted_plans, wanted
from tests.composed import config, experiment
from tests.run_dirs import make_run

GPU = "hardware=h100_96gb"
FITS = Forecast(Verdict("fits", "1 GiB left"))
DOES_NOT_FIT = Forecast(Verdict("does not fit", "2 GiB too much"))


def test_runs_are_predicted_on_gpus_and_on_request_on_cpus() -> None:
    def asked(*overrides: str, here: bool = True) -> bool:
        return wanted(experiment(*overrides), here=here)

    assert asked(GPU) and asked(GPU, here=False) and asked(GPU, "sweep.preflight=skip")
    assert not asked(GPU, "sweep.preflight=off")
    assert not asked("hardware=cpu") and asked("hardware=cpu", "sweep.preflight=skip")
    assert not asked("hardware=cpu", "sweep.preflight=skip", here=False), "a cluster's memory is not known here"


def test_off_may_be_a_yaml_boolean() -> None:
    """YAML reads it as a boolean."""
    plain = config()
    assert experiment().sweep.preflight == "warn"
    plain["sweep"] |= {"preflight": False}
    assert check(plain).sweep.preflight == "off"
    del plain["sweep"]["preflight"]
    assert check(plain).sweep.preflight == "warn", "a run that an older version has placed"


def said(answer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[list[Any], str]:
    def predict_all(configs: list[dict[str, Any]], **_: Any) -> list[Forecast]:
        assert [each["launch"]["workers"] for each in configs] == [2, 4]
        if isinstance(answer, Exception):
            raise answer
        return [answer, FITS]

    monkeypatch.setattr(preflight, "predict_all", predict_all)
    return predicted_plans([config(), config()], [2, 4]), capsys.readouterr().err


def test_runs_without_a_prediction_start_anyway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text = said(NOT_IN_TIME, monkeypatch, capsys)
    assert found == [{}, FITS.as_json()] and "1 of 2 combinations have no prediction after 60 s" in text
    found, text = said(not_planned("ValueError: odd"), monkeypatch, capsys)
    assert [plan["verdict"] for plan in found] == ["not planned", "fits"] and found[0]["reason"] == "ValueError: odd"
    assert "1 of 2 combinations could not be predicted" in text and "ValueError: odd" in text
    found, text = said(OSError("the disk is full"), monkeypatch, capsys)
    assert [plan["reason"] for plan in found] == ["OSError: the disk is full"] * 2
    assert "2 of 2 combinations could not be predicted" in text and len(text.splitlines()) == 1


def test_only_a_run_that_certainly_does_not_fit_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert does_not_fit(DOES_NOT_FIT.as_json()) == "predicted not to fit: 2 GiB too much"
    assert [does_not_fit({"verdict": each}) for each in ("fits", "borderline", "not planned")] == [""] * 3
    assert does_not_fit({}) == ""
    monkeypatch.setattr(preflight, "predict_all", lambda *_, **__: [DOES_NOT_FIT])
    for word in ("warn", "skip"):
        assert (
            predict_single_run(config(GPU), experiment(GPU, f"sweep.preflight={word}"), 8, here=True)
            == DOES_NOT_FIT.as_json()
        )
        assert capsys.readouterr().err == "meshrunner: predicted not to fit: 2 GiB too much\n"
    assert predict_single_run(config(GPU), experiment(GPU, "sweep.preflight=off"), 8, here=True) == {}


def test_worker_on_cpu_is_limited_to_its_share_of_memory() -> None:
    device = expected_devices(experiment("hardware=cpu", "launch.host_memory_gib=0.25"))
    assert (device.memory_gib, device.type) == (0.25, "cpu")


def test_summary_holds_the_prediction() -> None:
    assert predicted(PlanRecord()).as_json() == {}
    plan = PlanRecord.model_validate({"verdict": "fits", "memory/peak_active_gib": 1.5, "perf/wps": None})
    known = {"plan/verdict": "fits", "plan/memory/peak_active_gib": 1.5, "plan/perf/wps": None}
    assert predicted(plan).as_json() == known


def test_comparison_shows_the_error_of_the_prediction(tmp_path: Path) -> None:
    measured = {"memory/peak_active_gib": 20.0, "memory/peak_active_pct": 25.0}
    plan = {"plan/verdict": "fits", "plan/memory/peak_active_gib": 20.62, "plan/perf/wps": 90.0}
    make_run(tmp_path / "1", "seq_len=1", summary=measured | plan, wps=100.0)
    make_run(tmp_path / "2", "seq_len=2", summary=measured)
    comparison = compare_runs(read_runs([tmp_path]))
    cells = {column.title: column.cells for column in table(comparison)}
    assert cells["peak active, predicted"] == ["20.62 GiB (+3.1%)", ""]
    assert cells["WPS, predicted"] == ["90 (-10.0%)", ""]
    titles = list(cells)
    assert titles.index("peak active, predicted") == titles.index("peak active") + 1
    first, second = json.loads(as_json(comparison))
    assert (first["plan/verdict"], first["plan/perf/wps"]) == ("fits", 90.0)
    assert second["plan/verdict"] is second["plan/perf/wps"] is None
    assert as_csv(comparison).splitlines()[0].count("plan/") == 3
    skipped = make_run(tmp_path / "3", "seq_len=3", state="skipped")
    (skipped / "summary.json").unlink(missing_ok=True)
    (skipped / "plan.json").write_text(json.dumps({"verdict": "does not fit", "memory/peak_active_gib": 99.0}))
    last = json.loads(as_json(compare_runs(read_runs([tmp_path]))))[-1]
    assert (last["plan/verdict"], last["plan/memory/peak_active_gib"]) == ("does not fit", 99.0), "it never began"
    without = compare_runs(read_runs([tmp_path / "2"]))
    assert not [column.title for column in table(without) if "predicted" in column.title]
    assert "plan/verdict" not in as_json(without)


def test_plan_expands_a_grid_like_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    composer = Composer("plan", ["-m", "steps=5", "seed=1,2", "micro_batch=range(1,7,3)"])
    loader = composer.hydra.config_loader
    jobs = grid(loader, composer.compose_sweep())
    assert jobs == [["steps=5", f"seed={seed}", f"micro_batch={size}"] for seed in (1, 2) for size in (1, 4)]
    composer = Composer("plan", ["-m", "experiment=fsdp1_vs_fsdp2"])
    assert ["parallelism=fsdp1" in job for job in grid(loader, composer.compose_sweep())] == [True, False]
    config = composer.compose_sweep()
    config.hydra.sweeper._target_ = "own.Sweeper"
    with pytest.raises(ConfigError, match="this sweeper chooses combinations while it runs"):
        grid(loader, config)
    assert cli._dispatch(["plan", "seed=1,2", "-m", "--max", "seed"]) == 2
    assert "--max finds the value of seed; remove seed from the command line" in capsys.readouterr().err

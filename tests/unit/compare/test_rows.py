"""Which keys vary, which runs are repeats, and with which row a row is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import WPS, Comparison, compare_folders, compare_runs
from meshrunner.runner.compare.runs import read_run, read_runs
from tests.run_dirs import make_run, write


def compare(folder: Path, baseline: str | None = None) -> Comparison:
    return compare_runs(read_runs([folder]), baseline)


def make(folder: Path, *runs: str) -> None:
    """Run directories 0, 1, ...: each from overrides separated by spaces."""
    for i, overrides in enumerate(runs):
        make_run(folder / f"{i}", *overrides.split())


def test_an_option_is_one_column_whatever_keys_it_has(tmp_path: Path) -> None:
    make(tmp_path, "parallelism=fsdp1", "parallelism=fsdp2")
    found = compare(tmp_path)
    assert found.keys == ["parallelism"]
    assert [row.values for row in found.rows] == [{"parallelism": "fsdp1"}, {"parallelism": "fsdp2"}]


def test_a_preset_is_known_by_its_name(tmp_path: Path) -> None:
    make(tmp_path, "parallelism=fsdp1", "parallelism=fsdp1_tp")
    assert [row.values for row in compare(tmp_path).rows] == [{"parallelism": "fsdp1"}, {"parallelism": "fsdp1_tp"}]


def test_a_key_that_varies_under_one_option_is_a_column_beside_it(tmp_path: Path) -> None:
    make(
        tmp_path,
        *(f"parallelism={kind} parallelism.tensor={tensor}" for kind in ("fsdp1", "fsdp2") for tensor in (1, 2)),
        "parallelism=fsdp2 parallelism.prefetch=3",
    )
    assert compare(tmp_path).keys == ["parallelism", "parallelism.tensor", "parallelism.prefetch"]


def test_and_also_when_it_was_not_typed_but_came_with_an_experiment(tmp_path: Path) -> None:
    make(tmp_path, "parallelism=fsdp1", "parallelism=fsdp1 parallelism.tensor=2", "parallelism=fsdp2")
    for i in range(3):
        overrides = yaml.safe_load((tmp_path / f"{i}" / "overrides.yaml").read_text())
        (tmp_path / f"{i}" / "overrides.yaml").write_text(yaml.safe_dump(overrides | {"task": []}))
    assert compare(tmp_path).keys == ["parallelism", "parallelism.tensor"]


def test_a_key_that_older_runs_did_not_have_is_a_column(tmp_path: Path) -> None:
    make(tmp_path, "parallelism=fsdp1", "parallelism=fsdp2", "parallelism=fsdp2")
    config = yaml.safe_load((tmp_path / "2" / "config.yaml").read_text())
    del config["parallelism"]["prefetch"]
    (tmp_path / "2" / "config.yaml").write_text(yaml.safe_dump(config))
    found = compare(tmp_path)
    assert found.keys == ["parallelism", "parallelism.prefetch"] and len(found.rows) == 3


def test_a_key_that_was_typed_is_a_column_though_it_follows_from_the_option(tmp_path: Path) -> None:
    make(tmp_path, "parallelism=fsdp1", "parallelism=fsdp2 parallelism.tensor=2")
    assert compare(tmp_path).keys == ["parallelism", "parallelism.tensor"]


def test_the_learning_rate_that_came_with_a_model_is_no_column(tmp_path: Path) -> None:
    """As a column it would differ between any two models: no row would have a baseline."""
    make(tmp_path, "", "model=llama_large optimizer.lr=0.0003")
    found = compare(tmp_path, "model=llama_tiny")
    assert found.keys == ["optimizer.lr", "model"] and found.against == [None, None], "it was typed"
    overrides = tmp_path / "1" / "overrides.yaml"
    overrides.write_text(yaml.safe_dump(yaml.safe_load(overrides.read_text()) | {"task": ["model=llama_large"]}))
    found = compare(tmp_path, "model=llama_tiny")
    assert found.keys == ["model"] and [bool(each) for each in found.against] == [False, True]


def test_plain_keys_lists_and_numbers(tmp_path: Path) -> None:
    make(tmp_path, "steps=5 optimizer.lr=0.001", "steps=6 optimizer.betas=[0.8,0.9]", "launch.env.A=b")
    found = compare(tmp_path)
    assert found.keys == ["optimizer.lr", "optimizer.betas", "steps", "launch.env.A"]
    assert found.rows[0].values["optimizer.betas"] == [0.9, 0.95]


def test_a_number_is_read_as_when_it_ran(tmp_path: Path) -> None:
    run = make_run(tmp_path / "0")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lr: 0.003", "lr: 3e-3"))
    assert read_run(run).config["optimizer"]["lr"] == 0.003


@pytest.mark.parametrize(
    "other", ["seed=1", "tracker=wandb", "checkpoint.keep=5", "sweep.fail_fast=true", "launch.port=9999"]
)
def test_what_does_not_decide_the_figures_makes_repeats(tmp_path: Path, other: str) -> None:
    make(tmp_path, "", other)
    found = compare(tmp_path)
    assert found.keys == [] and [len(row.runs) for row in found.rows] == [2]


def test_runs_on_different_devices_are_no_repeats(tmp_path: Path) -> None:
    for i, device in enumerate(("A100", "H100", "H100")):
        make_run(tmp_path / f"{i}", summary={"device": device})
    found = compare(tmp_path)
    assert [(row.values, len(row.runs)) for row in found.rows] == [({"device": "A100"}, 1), ({"device": "H100"}, 2)]


def test_a_version_that_follows_from_the_settings_is_said_below(tmp_path: Path) -> None:
    for i, steps in enumerate((4, 5)):
        make_run(tmp_path / f"{i}", f"steps={steps}", environment={"packages": {"torch": f"2.1{i}"}})
    found = compare(tmp_path)
    assert found.keys == ["steps"] and found.remarks == ["the runs differ in torch: 2.10, 2.11"]


def test_repeats_are_merged(tmp_path: Path) -> None:
    memory = {"memory/peak_active_gib": 2.0, "perf/wps_p10": 90.0, "perf/wps_p90": 110.0}
    make_run(tmp_path / "0", wps=100.0, summary=memory)
    make_run(tmp_path / "1", wps=104.0, summary=memory | {"memory/peak_active_gib": 3.0, "perf/wps_p10": 80.0})
    make_run(tmp_path / "2", wps=101.0, summary=memory | {"perf/wps_p90": 120.0})
    make_run(tmp_path / "3", wps=1.0, state="failed", reason="rank 1 raised")
    (row,) = compare(tmp_path).rows
    assert [row.figures[f"perf/wps_{name}"] for name in ("median", "p10", "p90")] == [101.0, 80.0, 120.0]
    assert row.figures["memory/peak_active_gib"] == 3.0 and row.figures["memory/peak_reserved_gib"] is None
    assert (row.state, row.reason) == ("3 completed, 1 failed", "rank 1 raised")


def test_each_row_is_compared_with_the_one_that_differs_in_the_baseline_alone(tmp_path: Path) -> None:
    speeds = {
        "fsdp2 none": 110.0,
        "fsdp1 none": 100.0,
        "fsdp1 full": 50.0,
        "fsdp2 full": 40.0,
        "fsdp2 selective_op": 70.0,
    }
    for i, (name, wps) in enumerate(speeds.items()):
        layout, ac = name.split()
        make_run(tmp_path / f"{i}", f"parallelism={layout}", f"activation_checkpoint={ac}", wps=wps)
    found = compare(tmp_path, "parallelism=fsdp1")
    assert found.keys == ["activation_checkpoint", "parallelism"], "the baseline's key stands last"
    deltas = {
        " ".join(row.values[key] for key in found.keys): against and against.speed.percent
        for row, against in zip(found.rows, found.against, strict=True)
    }
    expected = {
        "none fsdp1": None,
        "none fsdp2": pytest.approx(10),
        "full fsdp1": None,
        "full fsdp2": pytest.approx(-20),
        "selective_op fsdp2": None,
    }
    assert deltas == expected
    assert list(deltas) == list(expected), "the baseline stands above what is compared with it"


def test_a_baseline_may_be_a_number_in_any_spelling(tmp_path: Path) -> None:
    make(tmp_path, "optimizer.lr=0.001", "optimizer.lr=0.002")
    assert compare(tmp_path, "optimizer.lr=1e-3").baseline == ("optimizer.lr", "0.001")


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        ("paralelism=fsdp1", "Did you mean 'parallelism'"),
        ("parallelism=fspd1", "Did you mean 'fsdp1'.*Known: fsdp1, fsdp2"),
        ("steps=4", "'steps' does not vary"),
        ("parallelism", "KEY=VALUE"),
        ("parallelism={", "no row has"),
    ],
)
def test_a_wrong_baseline_is_said(tmp_path: Path, baseline: str, said: str) -> None:
    make(tmp_path, "parallelism=fsdp1", "parallelism=fsdp2")
    with pytest.raises(ConfigError, match=said):
        compare(tmp_path, baseline)


def test_a_run_that_failed_has_no_delta(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "parallelism=fsdp1", wps=100.0)
    make_run(tmp_path / "1", "parallelism=fsdp2", wps=300.0, state="oom", reason="out of memory in step 3")
    against = compare(tmp_path, "parallelism=fsdp1").against[1]
    assert against is not None and against.speed.percent is None and against.verdict.why == "no completed run"


def test_folders_without_runs_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="neither a run nor a sweep"):
        read_runs([tmp_path])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="neither a run nor a sweep"):
        read_runs([tmp_path / "file"])
    assert capsys.readouterr().err == ""


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sweep" / "0")
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    assert len(read_runs([tmp_path / "link", tmp_path / "sweep", run])) == 1


def test_a_job_without_directory_is_a_row(tmp_path: Path) -> None:
    make_run(tmp_path / "000_a")
    write(tmp_path / "sweep.json", {"jobs": [{"name": "000_a"}, {"name": "001_b"}]})
    assert [run.state for run in read_runs([tmp_path])] == ["completed", "missing"]


@pytest.mark.parametrize("text", ["", "[", "a sentence", "- 1", "\x00", "a: &b [*b", "model: 3", "parallelism: [1, 2]"])
@pytest.mark.parametrize(
    "file", ["config.yaml", "overrides.yaml", "status.json", "summary.json", "events.jsonl", "environment.json"]
)
def test_damaged_files_are_a_row(tmp_path: Path, file: str, text: str) -> None:
    make_run(tmp_path / "0", "parallelism=fsdp1", environment={})
    run = make_run(tmp_path / "1", "parallelism=fsdp2", environment={})
    (run / file).write_text(text)
    found = compare_runs(read_runs([tmp_path]))
    assert len(found.rows) == 2
    if file == "status.json" or (file == "config.yaml" and ":" not in text):
        assert found.rows[1].state == "damaged" and file in found.rows[1].reason
    (run / file).unlink()
    assert len(compare_runs(read_runs([tmp_path])).rows) in (1, 2)


@pytest.mark.parametrize("value", ["x", True, [1], {"a": 1}, float("nan"), None])
def test_what_is_no_number_is_not_known(tmp_path: Path, value: object) -> None:
    run = make_run(tmp_path / "0")
    (run / "summary.json").write_text(json.dumps({"perf/wps_median": value, "device": value}))
    row = {"step": 1, "attempt": value, "train/loss": value, "perf/wps": value}
    (run / "events.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = compare(tmp_path).rows
    assert found.figures["perf/wps_median"] is None
    write(run / "summary.json", {})
    assert compare(tmp_path).rows[0].figures["perf/wps_median"] is None


def test_figures_of_a_run_that_has_not_ended_follow_from_its_events(tmp_path: Path) -> None:
    run = make_run(tmp_path / "0", wps=50.0)
    write(run / "summary.json", {"device": "cpu"})
    (row,) = compare(tmp_path).rows
    assert (row.figures["perf/wps_median"], row.figures["train/final_loss"]) == (50.0, 3.0)
    assert row.figures["perf/time_to_first_step_s"] == 1.0


def test_a_run_whose_process_is_gone_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "0")
    write(run / "status.json", {"state": "running", "owner": {"host": "another", "pid": 1}, "heartbeat": 0})
    (row,) = compare(tmp_path).rows
    assert row.state == "stale" and "resume" in row.reason


def test_settings_that_the_baseline_does_not_have_tell_no_rows_apart(tmp_path: Path) -> None:
    own = "model=own model.activation"
    make(tmp_path, "model=llama_tiny", f"{own}=relu", f"{own}=gelu", "model=llama_tiny steps=3", f"{own}=relu steps=3")
    found = compare(tmp_path, "model=llama_tiny")
    pairs = [
        (row.values, each and each.row.values["steps"]) for row, each in zip(found.rows, found.against, strict=True)
    ]
    assert [steps for _, steps in pairs] == [None, 4, 4, None, 3] and not found.remarks
    assert [values.get("model.activation") for values, _ in pairs] == [None, "relu", "gelu", None, "relu"]


def test_a_baseline_that_is_compared_with_nothing_is_said(tmp_path: Path) -> None:
    make(tmp_path, "parallelism=fsdp1", "parallelism=fsdp2 steps=3 seq_len=32")
    assert compare(tmp_path, "parallelism=fsdp1").remarks == [
        "nothing is compared with parallelism=fsdp1: all other rows also differ in other keys (seq_len, steps)"
    ]
    assert not compare(tmp_path).remarks


def test_a_sweep_has_a_baseline_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    for layout in ("fsdp1", "fsdp2"):
        make_run(sweep / layout, f"parallelism={layout}", "sweep.baseline=parallelism=fsdp1")
    (sweep / "sweep.json").write_text("{}")
    assert compare_folders([sweep], None).baseline == ("parallelism", "fsdp1")
    assert compare_folders([sweep], "parallelism=fsdp2").baseline == ("parallelism", "fsdp2")
    assert compare_folders([sweep, sweep / "fsdp1"], None).baseline is None
    for run in ("fsdp1", "fsdp2"):
        config = sweep / run / "config.yaml"
        config.write_text(config.read_text().replace("parallelism=fsdp1", "parallelism=ddp"))
    assert compare_folders([sweep], None).baseline is None
    assert "sweep.baseline: no row has parallelism=ddp" in capsys.readouterr().err


def test_runs_of_a_row_in_one_round_all_count(tmp_path: Path) -> None:
    """Two combinations that differ in the seed alone are one row, with two runs in every round."""
    for i in range(2):
        for n in (1, 2, 3):
            make_run(tmp_path / f"00{i}_repeat-{n}", "sweep.repeat=3", f"seed={i}", wps=100.0 + i + n)
    (row,) = compare_runs(read_runs([tmp_path])).rows
    assert sorted(row.measured(WPS)) == [101, 102, 102, 103, 103, 104]

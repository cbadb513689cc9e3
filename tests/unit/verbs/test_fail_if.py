"""`compare --fail-if`: exit status 3 if a tested difference is beyond a bound."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.verbs.records.compare import compare
from tests.run_dirs import make_run

LOSSES = (6.0, 5.0, 4.0)


def repeats(
    folder: Path,
    *overrides: str,
    wps: Sequence[float] = (99, 100, 101),
    active: float = 40.0,
    losses: Sequence[float] = LOSSES,
    batch: int = 8,
) -> Path:
    for i, value in enumerate(wps):
        make_run(
            folder / f"{i}-{'-'.join(overrides)}",
            *overrides,
            wps=value,
            losses=losses,
            summary={"memory/peak_active_gib": active + i / 100, "memory/peak_reserved_gib": 60.0},
            environment={"resolved": {"global_batch": batch}},
        )
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Against fsdp1, fsdp2 is 10% slower, takes 5% more memory and has the same losses."""
    repeats(tmp_path / "sweep", "parallelism=fsdp1")
    return repeats(tmp_path / "sweep", "parallelism=fsdp2", wps=(89, 90, 91), active=42.0)


@pytest.mark.parametrize(
    ("rule", "status", "said"),
    [
        ("speed<-5%", 3, "speed<-5%: failed: fsdp2: 90 against 100 WPS per device, -10.0% (-"),
        ("speed < -5 %", 3, "speed < -5 %: failed: fsdp2"),
        ("speed<-0%", 3, "speed<-0%: failed: fsdp2"),
        ("speed<-10.5%", 0, "speed<-10.5%: not decided: fsdp2"),
        ("speed<-20%", 0, "speed<-20%: passed: fsdp2: 90 against 100 WPS per device, -10.0% ("),
        ("speed>+5%", 0, "speed>+5%: passed: fsdp2"),
        ("wps<-9.5%", 3, "wps<-9.5%: failed: fsdp2"),
        ("perf/wps_median<-5%", 3, "failed: fsdp2"),
        ("peak_active_gib>+2%", 3, "peak_active_gib>+2%: failed: fsdp2: 42.01 GiB against 40.01 GiB peak active"),
        ("peak_active_gib>+6%", 0, "passed: fsdp2"),
        ("peak_reserved_gib>+2%", 0, "passed: fsdp2: 60.00 GiB against 60.00 GiB peak reserved, +0.0%"),
        ("mfu<-5%", 0, "mfu<-5%: not decided: fsdp2: MFU is unknown\n"),
        ("loss", 0, "loss: passed: fsdp2: identical"),
    ],
)
def test_a_rule_passes_or_fails(
    sweep: Path, capsys: pytest.CaptureFixture[str], rule: str, status: int, said: str
) -> None:
    assert compare([str(sweep), "--baseline", "parallelism=fsdp1", "--fail-if", rule]) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wps", "batch", "steps", "said"),
    [
        ((85, 95, 103), 8, 4, "-6.0% (-25.7% to +19.1%), within noise"),
        ((99, 100, 110), 8, 4, "+2.9% (-10.5% to +18.2%), within noise"),
        ((50, 51), 8, 4, "-49.5% (not tested)"),
        ((50, 51, 52), 4, 4, "-49.0% (other batch)"),
        ((50, 51, 52), 8, 9, "no baseline row has the same values of the other keys that vary"),
    ],
)
def test_what_is_not_decided_fails_only_with_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wps: Sequence[float], batch: int, steps: int, said: str
) -> None:
    repeats(tmp_path, "parallelism=fsdp1")
    repeats(tmp_path, "parallelism=fsdp2", f"steps={steps}", wps=wps, batch=batch)
    given = [str(tmp_path), "--baseline", "parallelism=fsdp1", "--fail-if", "speed<-5%"]
    assert compare(given) == 0
    out = capsys.readouterr().out
    assert "speed<-5%: not decided: " in out and said in out
    assert compare([*given, "--strict"]) == 3


def test_a_difference_within_noise_passes_if_its_interval_is_within_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repeats(tmp_path, "parallelism=fsdp1")
    repeats(tmp_path, "parallelism=fsdp2", wps=(99.5, 99.0, 101))
    given = [str(tmp_path), "--baseline", "parallelism=fsdp1", "--strict", "--fail-if"]
    assert compare([*given, "speed<-5%"]) == 0 and "within noise" in capsys.readouterr().out
    assert compare([*given, "speed<-1%"]) == 3 and "not decided" in capsys.readouterr().out


def test_losses_that_differ_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repeats(tmp_path, "parallelism=fsdp1")
    repeats(tmp_path, "parallelism=fsdp2", losses=(6.0, 5.5, 5.0))
    assert compare([str(tmp_path), "--baseline", "parallelism=fsdp1", "--fail-if", "loss"]) == 3
    assert "loss: failed: fsdp2: differs from step 2 on" in capsys.readouterr().out


def test_several_directories_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = repeats(tmp_path / "before", "parallelism=fsdp1")
    repeats(before, "parallelism=fsdp2", wps=(119, 120, 121))
    after = repeats(tmp_path / "after", "parallelism=fsdp1")
    repeats(after, "parallelism=fsdp2", wps=(99, 100, 101))
    assert compare([str(before), str(after), "--fail-if", "speed<-5%"]) == 3
    out = capsys.readouterr().out
    name = f"fsdp2 {after}"
    assert f"speed<-5%: failed: {name}: 100 against 120 WPS per device, -16.7%" in out
    assert f"speed<-5%: passed: fsdp1 {after}" in out


def test_every_row_is_compared_with_a_directory_of_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = repeats(tmp_path / "before", "parallelism=fsdp1")
    after = repeats(tmp_path / "after", "parallelism=fsdp2", "steps=5", wps=(89, 90, 91))
    repeats(after, "parallelism=fsdp2", "steps=6", wps=(99, 100, 102))
    assert compare([str(before), str(after), "--fail-if", "speed<-5%"]) == 3
    out = capsys.readouterr().out
    assert f"failed: fsdp2 steps=5 {after}" in out and f"passed: fsdp2 steps=6 {after}" in out


def test_equal_configurations_in_two_directories_are_two_rows(tmp_path: Path) -> None:
    before, after = repeats(tmp_path / "before"), repeats(tmp_path / "after", wps=(49, 50, 51))
    assert compare([str(before), str(after), "--fail-if", "speed<-5%"]) == 3
    assert compare([str(after), str(before), "--fail-if", "speed<-5%"]) == 0


def test_rules_judge_the_rows_of_where_but_not_only_those_of_top(sweep: Path) -> None:
    given = [str(sweep), "--baseline", "parallelism=fsdp1", "--fail-if", "speed<-5%"]
    assert compare([*given, "--where", "parallelism=fsdp2"]) == 3
    assert compare([*given, "--where", "parallelism=fsdp1"]) == 0
    assert compare([*given, "--top", "1"]) == 3


def test_rows_that_are_missing_or_failed_are_not_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = repeats(tmp_path / "before", "parallelism=fsdp1")
    repeats(before, "parallelism=fsdp2")
    repeats(before, "parallelism=fsdp1", "steps=9")
    after = repeats(tmp_path / "after", "parallelism=fsdp1")
    for i in range(3):
        make_run(after / f"oom-{i}", "parallelism=fsdp2", state="oom")
    assert compare([str(before), str(after), "--fail-if", "speed<-5%"]) == 0
    out = capsys.readouterr().out
    assert f"fsdp2 steps=4 {after}: WPS per device is unknown: the state of the row is oom" in out
    assert f"fsdp1 steps=9 {before}: no row is compared with this baseline" in out
    assert compare([str(before), str(after), "--fail-if", "speed<-5%", "--strict"]) == 3


def test_outcomes_do_not_mix_with_json_csv_or_markdown(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("--json", "--csv", "--markdown"):
        rules = ["--fail-if", "peak_active_gib>+2%", "--fail-if", "loss"]
        assert compare([str(sweep), "--baseline", "parallelism=fsdp1", form, *rules]) == 3
        out, err = capsys.readouterr()
        assert "failed" not in out and "peak_active_gib>+2%: failed" in err and "loss: passed" in err
        if form == "--json":
            assert json.loads(out)[1]["memory/peak_active_gib_p_value"] < 0.05
        elif form == "--csv":
            assert float(list(csv.DictReader(io.StringIO(out)))[1]["memory/peak_active_gib_vs_baseline_pct"]) > 4


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("speed<5", "expected a bound such as 'speed<-5%' or 'peak_active_gib>+2%', or the word 'loss', got 'speed<5'"),
        ("speed<5%", "expected a bound such as 'speed<-5%'"),
        ("speed>-5%", "expected a bound such as 'speed<-5%'"),
        ("speed", "expected a bound such as 'speed<-5%'"),
        ("peak_activ_gib>+5%", "there is no key 'peak_activ_gib'. Did you mean 'peak_active_gib'?"),
    ],
)
def test_a_wrong_rule_is_said(sweep: Path, rule: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compare([str(sweep), "--baseline", "parallelism=fsdp1", "--fail-if", rule])
    assert said in str(error.value)


def test_rules_need_a_baseline_and_strict_needs_rules(sweep: Path) -> None:
    with pytest.raises(ConfigError, match="there is no baseline; add --baseline KEY=VALUE"):
        compare([str(sweep), "--fail-if", "loss"])
    with pytest.raises(ConfigError, match="--strict: there is no rule"):
        compare([str(sweep), "--strict"])

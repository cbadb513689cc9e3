"""`sweep.exclude`: typed values, rules that can match nothing, and quoting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.config.compose import Composed
from meshrunner.runner.config.hydra.overrides import prepared, split_outside
from meshrunner.runner.rundir import read_config
from meshrunner.runner.rundir.states import read_status
from meshrunner.runner.sweep.exclude import check_rules, matching_rule
from tests.e2e.command import TINY

CONFIG = {
    "micro_batch": 1,
    "seed": 0,
    "max_grad_norm": None,
    "compile": {"fullgraph": True},
    "optimizer": {"lr": 0.001, "betas": [0.9, 0.95], "implementation": "fused"},
    "data": {"path": "a b.jsonl", "vocab_size": "auto"},
    "parallelism": {"kind": "fsdp2", "shard": 2, "prefetch": 0},
}
OPTIONS = {"parallelism": ["ddp", "fsdp1", "fsdp2"], "experiment": ["pr165_1d"], "size": ["8", "9"]}


def combination(**choices: Any) -> Composed:
    return Composed(CONFIG, Path("0"), {"choices": {"parallelism": "fsdp2", "experiment": None, **choices}})


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ("micro_batch=1", True),
        ("micro_batch=1.0", True),
        ("compile={fullgraph: true}", True),
        ("compile={fullgraph: false}", False),
        ("micro_batch=true", False),
        ("micro_batch='1'", False),
        ("micro_batch=2,1", True),
        ("seed=0", True),
        ("seed=false", False),
        ("seed=null", False),
        ("max_grad_norm=null", True),
        ("max_grad_norm=0", False),
        ("optimizer.lr=1e-3", True),
        ("optimizer.lr=0.001", True),
        ("optimizer.lr=1e-4", False),
        ("optimizer.betas=[0.9,0.95]", True),
        ("optimizer.betas=[0.9, 0.95]", True),
        ("optimizer.betas=[0.9]", False),
        ("optimizer.betas=[0.8,0.95],[0.9,0.95]", True),
        ("optimizer.betas=[0.9,0.95] seed=1", False),
        ("compile.fullgraph=true", True),
        ("compile.fullgraph=1", False),
        ("compile.fullgraph=false", False),
        ("optimizer.implementation=fused", True),
        ("data.path='a b.jsonl'", True),
        ("data.vocab_size=auto,5", True),
        ("parallelism=fsdp2 seed=0", True),
        ("parallelism=fsdp1", False),
        ("experiment=null", True),
        ("size=8", True),
        ("size=9", False),
    ],
)
def test_condition_compares_yaml_values(rule: str, matches: bool) -> None:
    assert (matching_rule([rule], combination(size="8")) == rule) is matches


@pytest.mark.parametrize(
    "rule",
    ["seed", "seed=", "=1", "", "seed=1,", "+seed=1", "~seed", "seed=interval(0,1)", "seed=[1", "seed=" + "[" * 500],
)
def test_invalid_conditions_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="expected conditions, for example"):
        matching_rule([rule], combination())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("parallelism=fdsp2", "parallelism has no option 'fdsp2'. Did you mean 'fsdp2'? Known: ddp, fsdp1, fsdp2"),
        ("parallelism=fsdp2,fsdpp1", "no option 'fsdpp1'. Did you mean 'fsdp1'"),
        ("paralelism=fsdp2", "a key 'paralelism'. Did you mean 'parallelism'"),
        ("parallelism.shrad=2", "a key 'parallelism.shrad'. Did you mean 'parallelism.shard'"),
        ("optimizer.betas.first=2", "a key 'optimizer.betas.first'. Did you mean 'optimizer.betas'"),
        ("stepz=2", "a key 'stepz'."),
    ],
)
def test_rule_that_can_match_nothing_is_refused(rule: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules([rule], [combination()], OPTIONS.__getitem__)
    assert f"'{rule}'" in str(caught.value) and message in str(caught.value)


def test_key_of_any_combination_is_accepted() -> None:
    other = Composed({"parallelism": {"kind": "ddp", "bucket_cap_mb": 25.0}}, Path("1"), {"choices": {}})
    rule = "parallelism.bucket_cap_mb=25"
    check_rules([rule], [combination(), other], OPTIONS.__getitem__)
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        check_rules([rule], [combination()], OPTIONS.__getitem__)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("sweep.exclude=[a=b c=d]", "sweep.exclude=['a=b c=d']"),
        ("sweep.exclude=[a=b,c d=e]", "sweep.exclude=['a=b,c d=e']"),
        ("sweep.exclude=[a=b, c=d]", "sweep.exclude=['a=b','c=d']"),
        ("sweep.exclude=[a=[1,2],[3,4],b.c=1]", "sweep.exclude=['a=[1,2],[3,4]','b.c=1']"),
        ("sweep.exclude=a=b c=d", "sweep.exclude=['a=b c=d']"),
        ("++sweep.exclude=[a='x y']", r"++sweep.exclude=['a=\'x y\'']"),
        ("sweep.exclude=['a=b',c=d]", "sweep.exclude=['a=b','c=d']"),
        ("sweep.baseline=parallelism=fsdp1", "sweep.baseline='parallelism=fsdp1'"),
        ("+sweep.baseline=parallelism=fsdp1", "+sweep.baseline='parallelism=fsdp1'"),
        ("launch.env.A=b=c", "++launch.env.A=b=c"),
        *((same, same) for same in ("sweep.exclude=[]", "sweep.exclude=['a=b c=d']", "sweep.exclude=null", "seed=1=2")),
        *((same, same) for same in ("sweep.baseline='a=b'", "sweep.baseline=null", "my.sweep.exclude=[a=b]")),
    ],
)
def test_rules_need_no_quotes(typed: str, read: str) -> None:
    assert prepared([typed]) == [read]


def test_split_outside_ignores_brackets_and_quotes() -> None:
    assert split_outside("a,[b,c],'d,e',{f,{g,h}},i", ",") == ["a", "[b,c]", "'d,e'", "{f,{g,h}}", "i"]
    assert split_outside(r"'it\'s, so',b", ",") == [r"'it\'s, so'", "b"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def place(*overrides: str) -> int:
    return cli._dispatch(["place", "-m", *TINY, "hydra.sweep.dir=sweep", *overrides])


def test_sweep_skips_combinations_that_match_a_rule(folder: Path) -> None:
    rules = "sweep.exclude=[micro_batch=1 seed=0,3, optimizer.lr=1e-4 optimizer.betas=[0.9,0.95]]"
    grid = ("seed=0,1", "optimizer.lr=1e-3,1e-4", "optimizer.betas=[0.9,0.95]")
    assert place(*grid, rules, "sweep.baseline=parallelism=fsdp1") == 0
    states = {run.name[4:]: read_status(run).state for run in Path("sweep").glob("0*")}
    assert states == {
        "seed-0_lr-0.001": "skipped",
        "seed-0_lr-0.0001": "skipped",
        "seed-1_lr-0.001": "pending",
        "seed-1_lr-0.0001": "skipped",
    }


@pytest.mark.parametrize(
    ("rule", "message"),
    [("parallelism=fdsp2", "'fsdp2'"), ("parallelism.shrad=2", "'parallelism.shard'"), ("seed", "expected conditions")],
)
def test_sweep_with_an_impossible_rule_writes_nothing(
    rule: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place("seed=0,1", f"sweep.exclude=['{rule}']") == 2
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_options_in_the_users_directory_are_accepted(folder: Path) -> None:
    (folder / "own" / "lr_schedule").mkdir(parents=True)
    (folder / "own" / "lr_schedule" / "mine.yaml").write_text("kind: constant\nwarmup_steps: 1\n")
    given = ("--config-dir", "own", "seed=0,1")
    assert place(*given, "lr_schedule=mine,constant", "sweep.exclude=[lr_schedule=mine seed=0]") == 0
    assert place(*given, "hydra.sweep.dir=other", "sweep.exclude=[lr_schedule=mien]") == 2


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("nonsense", "expected KEY=VALUE"),
        ("paralelism=fsdp1", "Did you mean 'parallelism'?"),
        ("parallelism=ddp", "Known: fsdp1, fsdp2"),
    ],
)
def test_a_baseline_that_names_no_combination_is_refused(
    baseline: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place("parallelism=fsdp1,fsdp2", f"sweep.baseline={baseline}") == 2
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []
    assert place("parallelism=fsdp1,fsdp2", "sweep.baseline=parallelism=fsdp2") == 0


def test_no_combination_changes_the_next_one(folder: Path) -> None:
    """The sweep reads each YAML file once."""
    assert place("+launch.env.X=1,2", "seed=0,1") == 0
    variables = [read_config(run)["launch"]["env"] for run in sorted(Path("sweep").glob("0*"))]
    assert variables == [{"X": value} for value in (1, 1, 2, 2)]

"""No setting is silently ignored: what becomes of every key and flag, Hydra's and ours."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.conf import HydraConf
from omegaconf import OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli, figures
from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.commands.usage import describe
from meshrunner.runner.config.consistency import fit, remarks
from meshrunner.runner.config.hydra.private import get_args_parser
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.sweep.hydra_launchers import check_direction
from tests.composed import config, experiment
from tests.e2e.command import TINY

WORKS, REFUSED, REMARK = "works", "refused", "remarked on"
SWEEPS = "works in a sweep, remarked on in a single run"
TUNES = "works in a tune, remarked on elsewhere"
SINGLE = "works in a single run, remarked on in a sweep"

HYDRA = {
    "mode": WORKS,
    "searchpath": WORKS,
    "run.dir": SINGLE,
    "sweep.dir": SWEEPS,
    "sweep.subdir": REFUSED,
    "hydra_logging": REMARK,
    "job_logging": REMARK,
    "sweeper": SWEEPS,
    "launcher": WORKS,
    "callbacks": REMARK,
    "help.app_name": WORKS,
    "help.header": WORKS,
    "help.footer": WORKS,
    "help.template": WORKS,
    "hydra_help.hydra_help": WORKS,
    "hydra_help.template": WORKS,
    "output_subdir": REFUSED,
    "overrides.hydra": REFUSED,
    "overrides.task": REFUSED,
    "job.name": WORKS,  # in the name of a folder, as all of `job` that works
    "job.chdir": REFUSED,
    "job.override_dirname": REFUSED,
    "job.id": "works in a single run, refused in a sweep",
    "job.num": "works in a single run, refused in a sweep",
    "job.config_name": REFUSED,
    "job.env_set": REFUSED,
    "job.env_copy": REFUSED,
    "job.config.override_dirname.kv_sep": WORKS,
    "job.config.override_dirname.item_sep": WORKS,
    "job.config.override_dirname.exclude_keys": WORKS,
    "runtime.version": REFUSED,
    "runtime.version_base": REFUSED,
    "runtime.cwd": REFUSED,
    "runtime.config_sources": REFUSED,
    "runtime.output_dir": REFUSED,
    "runtime.choices": REFUSED,
    "verbose": REMARK,
}
"""Keys below `hydra`."""
FLAGS = {
    "--help": WORKS,
    "--hydra-help": WORKS,
    "--version": WORKS,
    "--cfg": WORKS,
    "--resolve": "works with --cfg and --help, else refused",
    "--package": "works with --cfg, else refused",
    "--run": WORKS,
    "--multirun": WORKS,
    "--shell-completion": WORKS,
    "--config-path": REFUSED,
    "--config-name": WORKS,
    "--config-dir": WORKS,
    "--experimental-rerun": REFUSED,
    "--info": WORKS,
}
OURS = {
    **dict.fromkeys(
        ("steps", "seed", "seq_len", "micro_batch", "global_batch", "max_grad_norm", "log_every", "progress"), WORKS
    ),
    "deterministic": WORKS,
    "measure_after": "works, remarked on where it leaves no step",
    "objective": "works with an adaptive sweeper, else remarked on; refused where no summary has it",
    **dict.fromkeys(
        (
            "launch.nodes",
            "launch.workers",
            "launch.threads",
            "launch.env",
            "launch.bind",
            "launch.port",
            "launch.emulate",
            "launch.python",
        ),
        WORKS,
    ),
    **dict.fromkeys(("launch.host_memory_gib", "launch.start_timeout_minutes", "launch.timeout_minutes"), WORKS),
    **dict.fromkeys(
        (
            "sweep.exclude",
            "sweep.repeat",
            "sweep.seeds",
            "sweep.retry",
            "sweep.rerun",
            "sweep.devices",
            "sweep.fail_fast",
        ),
        SWEEPS,
    ),
    "sweep.baseline": SWEEPS,
    "sweep.best_by": SWEEPS,
    "sweep.max_repeat": SWEEPS,
    "sweep.order": SWEEPS,
    "sweep.preflight": WORKS,
    "sweep.explain": WORKS,
    **dict.fromkeys(("tune.runs", "tune.minutes", "tune.tolerance", "tune.steps"), TUNES),
    **dict.fromkeys(
        ("model", "activation_checkpoint", "compile", "precision", "loss", "optimizer", "data", "checkpoint", "eval"),
        WORKS,
    ),
    **dict.fromkeys(("hardware", "tracker", "profiler", "experiment", "space"), WORKS),
    "parallelism": "works, remarked on where a kind has no use for reshard_after_forward",
    "wrap": "works, remarked on under a parallelism without units",
    "lr_schedule": "works, remarked on where the warm-up lasts for ever",
}
"""Top-level keys and groups, and the keys of the two sections that are no groups."""
SLURM = dict.fromkeys(Slurm.model_fields, WORKS) | {"max_parallel": SWEEPS}


def leaves(node: Any, prefix: str = "") -> Iterator[str]:
    for key, value in node.items_ex(resolve=False) if OmegaConf.is_dict(node) else node.items():
        if (OmegaConf.is_dict(value) or isinstance(value, dict)) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_key_of_hydra_is_listed() -> None:
    assert set(leaves(OmegaConf.structured(HydraConf))) - {"defaults"} == set(HYDRA)


def test_every_flag_of_hydra_is_listed() -> None:
    actions = [each for each in get_args_parser()._actions if not isinstance(each, argparse._HelpAction)]
    assert {each.option_strings[0] for each in actions if each.option_strings} == set(FLAGS)


def test_help_names_every_flag_that_works() -> None:
    text = describe(COMMANDS["run"])
    assert [flag for flag, verdict in FLAGS.items() if verdict.startswith("works") and flag not in text] == [
        "--version",
        "--shell-completion",
    ]


def test_every_key_of_ours_is_listed() -> None:
    plain = config()
    sections = ("launch", "sweep", "tune")
    ours = {key for key in plain if key not in sections} | {f"{s}.{key}" for s in sections for key in plain[s]}
    assert ours | {"experiment", "space"} == set(OURS)
    assert set(SLURM) == set(Slurm.model_fields)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def place(*overrides: str) -> int:
    return cli._dispatch(["place", *TINY, *overrides])


VALUE = {
    "hydra.job.chdir": "true",
    "hydra.job.env_set": "{A:b}",
    "hydra.job.env_copy": "[HOME]",
    "hydra.output_subdir": ".hydra",
    "hydra.sweep.subdir": "x",
    "hydra.verbose": "true",
    "hydra.callbacks": "{a:{_target_:hydra.experimental.callback.Callback}}",
    "hydra.job_logging": "{version:1}",
    "hydra.hydra_logging": "{version:1}",
    "hydra.sweeper": "{max_batch_size:2}",
    "hydra.run.dir": "other",
    "hydra.sweep.dir": "other",
    "hydra.overrides.hydra": "[x]",
    "hydra.overrides.task": "[x]",
    "hydra.runtime.config_sources": "[]",
    "hydra.runtime.choices": "{a:b}",
    "sweep.exclude": "[seed=1]",
    "sweep.baseline": "parallelism=fsdp1",
    "sweep.best_by": "[seed]",
    "sweep.repeat": "2",
    "sweep.max_repeat": "9",
    "sweep.order": "as_given",
    "sweep.seeds": "2",
    "sweep.retry": "1",
    "sweep.rerun": "[oom]",
    "sweep.devices": "2",
    "sweep.fail_fast": "true",
}


def listed(verdict: str) -> list[str]:
    table = {**{f"hydra.{key}": each for key, each in HYDRA.items()}, **OURS}
    return [key for key, each in table.items() if each == verdict]


@pytest.mark.parametrize("key", listed(REFUSED))
@pytest.mark.parametrize("sweep", [(), ("-m", "seed=1,2")], ids=["one", "sweep"])
def test_refused(key: str, sweep: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert place(*sweep, f"++{key}={VALUE.get(key, 'x')}") == 2
    assert key in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("key", listed(REMARK))
@pytest.mark.parametrize("sweep", [(), ("-m", "seed=1,2")], ids=["one", "sweep"])
def test_remarked_on(key: str, sweep: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert place(*sweep, f"++{key}={VALUE[key]}") == 0
    (remark,) = capsys.readouterr().err.splitlines()
    assert remark.startswith(f"meshrunner: {key} has no effect")


@pytest.mark.slow_but("sweep.repeat", "hydra.sweeper")
@pytest.mark.parametrize("key", listed(SWEEPS))
def test_settings_of_sweeps_are_remarked_on_in_a_single_run(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = VALUE[key]
    assert place(f"++{key}={value}") == 0
    (remark,) = capsys.readouterr().err.splitlines()
    assert key in remark and remark.endswith("no effect on a single run; use -m to run a sweep")
    given = () if key == "hydra.sweep.dir" else ("hydra.sweep.dir=sweep",)
    assert place("-m", "seed=1,2", f"++{key}={value}", *given) == 0
    assert "no effect" not in capsys.readouterr().err


@pytest.mark.parametrize("given", ["tune.runs=3", "tune.minutes=3", "tune.tolerance=0.1", "tune.steps=9"])
def test_settings_of_a_tune_are_remarked_on_elsewhere(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert place("-m", "seed=1,2", given) == 0
    key = given.partition("=")[0]
    assert capsys.readouterr().err == (
        f"meshrunner: {key} has no effect: use `meshrunner tune` to search for the fastest combination\n"
    )


def test_settings_of_single_runs_are_remarked_on_in_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert place("-m", "seed=1,2", "hydra.run.dir=other") == 0
    assert "hydra.run.dir has no effect on a sweep" in capsys.readouterr().err
    assert place("hydra.run.dir=other") == 0
    assert capsys.readouterr().err == ""
    assert place("-m", "seed=1,2", "hydra.job.num=5") == 2
    assert place("hydra.job.num=5", "hydra.run.dir=run${hydra.job.num}") == 0
    assert Path("run5").is_dir()


def test_a_grid_without_a_sweep_is_remarked_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own" / "experiment").mkdir(parents=True)
    (folder / "own" / "experiment" / "grid.yaml").write_text(
        "# @package _global_\nhydra: {sweeper: {params: {seed: '1,2'}}}\n"
    )
    assert place("--config-dir=own", "experiment=grid") == 0
    assert "hydra.sweeper.params.seed: no effect on a single run; use -m to run a sweep" in capsys.readouterr().err
    assert place("--config-dir=own", "experiment=grid", "-m", "hydra.sweep.dir=sweep") == 0
    assert capsys.readouterr().err == ""
    assert len(list(Path("sweep").glob("0*"))) == 2
    assert place("experiment=fsdp1_vs_fsdp2", "--run") == 0
    assert "hydra.sweeper.params" in capsys.readouterr().err


@pytest.mark.slow
def test_an_objective_that_no_summary_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert place("objective=perf/wps") == 2
    assert "objective: no run has a figure 'perf/wps'. Did you mean 'perf/wps_" in capsys.readouterr().err
    for key in figures.summary_keys():
        assert experiment(f"objective={key}").objective == key
    assert place("-m", "seed=1,2", "objective=train/final_loss") == 0
    assert "objective has no effect: the sweep tries every combination" in capsys.readouterr().err
    assert "profiler=trace" in remarks(experiment("objective=trace/idle_pct"))[0]
    assert "checkpoint=dcp" in remarks(experiment("objective=perf/checkpoint_time_s"))[0]
    assert remarks(experiment("objective=perf/checkpoint_time_s", "checkpoint=dcp")) == []
    assert "use eval=held_out" in remarks(experiment("objective=eval/loss"))[0]
    assert remarks(experiment("objective=eval/best_loss", "eval=held_out")) == []


@pytest.mark.parametrize(
    ("sweeper", "given", "objective", "outcome"),
    [
        ({"direction": "minimize"}, "", "perf/wps_median", "Add hydra.sweeper.direction=maximize"),
        ({"direction": "minimize"}, "hydra.sweeper.direction=minimize", "perf/wps_median", ""),
        ({"direction": "minimize"}, "", "train/final_loss", ""),
        ({"direction": "maximize"}, "", "perf/wps_median", ""),
        ({"optim": {"maximize": False}}, "", "perf/mfu_median", "Add hydra.sweeper.optim.maximize=true"),
        ({"ax_config": {"experiment": {"minimize": True}}}, "", "perf/wps_p10", "experiment.minimize=false"),
        ({"params": {}}, "", "perf/wps_median", ""),
    ],
)
def test_sweeper_that_optimizes_in_the_wrong_direction(
    sweeper: dict[str, Any], given: str, objective: str, outcome: str
) -> None:
    hydra = {"sweeper": {"_target_": "optuna", **sweeper}, "overrides": {"hydra": [given]}}
    composed = OmegaConf.create({"objective": objective, "hydra": hydra})
    if outcome:
        with pytest.raises(ConfigError, match="minimizes") as caught:
            check_direction(composed)
        assert outcome in str(caught.value)
    else:
        check_direction(composed)


@pytest.mark.parametrize(
    ("overrides", "remark"),
    [
        (["lr_schedule.warmup_steps=30"], "lr_schedule.warmup_steps(30) is not below steps(30)"),
        (["lr_schedule=warmup_linear", "lr_schedule.warmup_steps=30"], "lr_schedule.warmup_steps(30) is not below"),
        (
            ["lr_schedule=warmup_cosine", "lr_schedule.warmup_steps=40", "lr_schedule.total_steps=40", "steps=50"],
            "lr_schedule.warmup_steps(40) is not below total_steps(40)",
        ),
        (["parallelism=ddp", "wrap=root_only"], "wrap=root_only has no effect: ddp has no FSDP units"),
        (["parallelism=ddp", "parallelism.reshard_after_forward=never"], "reshard_after_forward has no effect: ddp"),
        (["precision=float8"], "precision=float8 without inductor"),
        (["precision=float8", "compile=per_block", "compile.backend=aot_eager"], "precision=float8 without inductor"),
        (["precision=float8", "compile=per_block"], ""),
        (["precision=float8", "precision.emulate=true"], ""),
        (["compile=per_block", "compile.mode=reduce-overhead", "parallelism=ddp"], ""),
        (["lr_schedule.warmup_steps=29"], ""),
        (["steps=5"], ""),
        (["parallelism=fsdp1", "wrap=root_only", "parallelism.reshard_after_forward=never"], ""),
    ],
)
def test_settings_that_others_make_idle(overrides: list[str], remark: str) -> None:
    given = experiment(*overrides)
    fit(given, 2)
    assert [remark in found for found in remarks(given)] == ([True] if remark else [])

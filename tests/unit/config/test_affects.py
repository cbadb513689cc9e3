"""A key says once, where it is declared, what it affects; every place that depends on it follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from pydantic import create_model

from meshrunner.recipes import config_keys
from meshrunner.recipes.checkpoint.on_disk import Record
from meshrunner.recipes.config_keys import affected_by, affecting, with_defaults
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects
from meshrunner.recipes.precision.base import FP32
from meshrunner.runner.compare.keys import MEASURED
from meshrunner.runner.config import resumable
from meshrunner.runner.config.experiment import Experiment, Sweep
from meshrunner.runner.config.hydra import no_effect
from meshrunner.runner.rundir.files import LAYOUTS
from meshrunner.runner.rundir.summary import Layouts, add_layout
from meshrunner.runner.trackers.description import settings
from tests.composed import experiment

KEYS = {
    "tracker.mode": (False, False, False, True),
    "sweep.repeat": (False, False, False, False),
    "sweep.preflight": (False, False, False, False),
    "sweep.of_an_old_version": (False, False, False, False),
    "objective": (False, False, False, False),
    "progress": (False, False, False, True),
    "seed": (False, False, True, False),
    "steps": (True, False, True, True),
    "measure_after": (True, False, True, False),
    "log_every": (True, False, True, True),
    "micro_batch": (True, True, True, True),
    "global_batch": (True, True, True, False),
    "checkpoint.keep": (False, False, True, True),
    "checkpoint.every": (True, False, True, True),
    "lr_schedule.warmup_steps": (True, False, True, False),
    "parallelism.prefetch": (True, True, True, True),
    "launch.threads": (True, True, True, True),
    "launch.env.NCCL_DEBUG": (True, True, True, True),
    "launch.port": (False, False, False, True),
    "launch.timeout_minutes": (False, False, False, True),
    "launch.start_timeout_minutes": (False, False, False, True),
    "model.dim": (True, True, True, False),
    "hardware.kind": (True, True, True, False),
    "profiler.steps": (True, True, True, False),
    "of_an_old_version": (True, True, True, False),
}
"""Key -> whether it tells runs apart, starts a new layout, is shown by trackers, and may change when a run continues."""


def places(key: str, kind: str, folder: Path) -> tuple[bool, bool, bool, bool]:
    """Whether each place takes account of a key."""
    group, _, inside = key.partition(".")
    flat: dict[str, Any] = {key: 1} | ({f"{group}.kind": kind} if kind else {})
    nested: dict[str, Any] = {key: 1}
    if inside:
        first, _, rest = inside.partition(".")
        nested = {group: {first: {rest: 1} if rest else 1} | ({"kind": kind} if kind else {})}
    folder.mkdir(exist_ok=True)
    add_layout(folder, 1, nested, {})
    return (
        key in affecting(flat, MEASURED),
        key in Layouts.read(folder / LAYOUTS).layouts[0].settings,
        key in settings(nested),
        not affected_by(key, flat) & resumable.STAY_THE_SAME,
    )


def field(effects: Affects | None) -> Any:
    """The annotation of a whole number that declares its effects, or that has those of its section."""
    return int if effects is None else Annotated[int, effects]


@pytest.mark.parametrize("key", KEYS)
def test_each_place_takes_account_of_the_keys_it_should(key: str, tmp_path: Path) -> None:
    assert places(key, "", tmp_path) == KEYS[key]


def test_keys_of_own_classes_affect_what_they_do_in_shipped_ones(tmp_path: Path) -> None:
    for key in ("tracker.token_file", "checkpoint.keep", "checkpoint.own", "model.own", "parallelism.own"):
        known = {"tracker.token_file": "tracker.mode", "checkpoint.own": "checkpoint.every", "model.own": "model.dim"}
        like = known.get(key, "parallelism.shard" if key == "parallelism.own" else key)
        assert places(key, "not_installed:Own", tmp_path / key) == places(like, "", tmp_path / f"{key} shipped")


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        (Affects.NOTHING, (False, False, False, True)),
        (Affects.CHANCE, (False, False, True, False)),
        (Affects.FIGURES, (True, False, True, True)),
        (Affects.RESULT, (True, False, True, False)),
        (Affects.SPEED, (True, True, True, True)),
        (None, (True, True, True, False)),
    ],
)
def test_all_places_follow_a_new_key_of_an_option(
    effects: Affects | None, expected: tuple[bool, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = create_model("Added", __base__=FP32, added=(field(effects), 0))
    monkeypatch.setattr(FP32, "resolve", classmethod(lambda cls, kind: added))
    monkeypatch.setattr("meshrunner.recipes.precision.base.Precision.resolve", classmethod(lambda cls, kind: added))
    config_keys._affected_by.cache_clear()
    assert places("precision.added", "fp32", tmp_path) == expected
    run = experiment("precision=fp32", "hardware=cpu")
    changed = run.model_copy(update={"precision": added(kind="fp32", added=1)})
    config = run.model_copy(update={"precision": added(kind="fp32")}).model_dump(mode="json")
    monkeypatch.setattr(resumable, "check", Mock(side_effect=ConfigError))  # the classes here are not Experiment's
    record = Record.__new__(Record)
    object.__setattr__(record, "config", config)
    object.__setattr__(record, "step", 3)
    if expected[3]:
        resumable._refuse_changes(record, changed, tmp_path)
    else:
        with pytest.raises(ConfigError, match=r"precision\.added: was 0, is 1"):
            resumable._refuse_changes(record, changed, tmp_path)
    config_keys._affected_by.cache_clear()


@pytest.mark.parametrize(
    ("effects", "idle"), [(None, True), (Affects.SWEEP | Affects.DISPLAY, False), (Affects.SPEED, False)]
)
def test_new_key_of_sweeps_is_idle_on_a_single_run(
    effects: Affects | None, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = create_model("Section", __base__=Sweep, added=(field(effects), 0))
    wider = create_model("Wider", __base__=Experiment, sweep=(section, ...))

    monkeypatch.setattr("meshrunner.runner.config.experiment.Experiment", wider)
    config_keys._affected_by.cache_clear()
    hydra = {"overrides": {"hydra": [], "task": []}, "runtime": {"choices": {"hydra/sweeper": "basic"}}}
    config = OmegaConf.create({"sweep": {"added": 1}, "hydra": hydra})
    assert [line for line in no_effect.without_effect(config, sweep=False) if "sweep.added" in line] == (
        ["sweep.added: no effect on a single run; use -m to run a sweep"] if idle else []
    )
    config_keys._affected_by.cache_clear()


def test_every_key_of_a_run_is_read_without_torch() -> None:
    program = (
        "import sys; from meshrunner.recipes.config_keys import affected_by; affected_by('tracker.x', {}); "
        "affected_by('parallelism.x', {'parallelism.kind': 'own:X'}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_configurations_of_older_versions_get_the_defaults_of_newer_keys() -> None:
    config = experiment().model_dump(mode="json")
    older = {key: value for key, value in config.items() if key not in ("eval", "deterministic")}
    for section, key in (("model", "qkv_bias"), ("model", "weights"), ("data", "documents"), ("launch", "emulate")):
        older[section] = {name: value for name, value in older[section].items() if name != key}
    assert older != config and with_defaults(older) == config
    assert with_defaults({"model": {"kind": "mine:Model"}})["model"] == {
        "kind": "mine:Model",
        "freeze": [],
        "weights": None,
    }

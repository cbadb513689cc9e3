"""Find settings without effect: keys of Hydra's that are refused, and keys that are reported in a line."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf

from meshrunner.recipes.affects import affected_by
from meshrunner.recipes.config_diff import differences
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects

REFUSED = {
    "hydra.job.chdir": "workers run in the current directory",
    "hydra.job.env_copy": "workers inherit the environment of the command; use launch.env.NAME=VALUE to add to it",
    "hydra.job.env_set": "use launch.env.NAME=VALUE to set the environment of the workers",
    "hydra.output_subdir": "config.yaml and overrides.yaml are written to the run directory itself",
    "hydra.sweep.subdir": "a run of a sweep is named after its number and the values that vary",
}
"""Refused keys, which affect only functions that Hydra calls -> what happens instead."""
SET_BY_HYDRA = ("hydra.runtime", "hydra.overrides", "hydra.job.override_dirname", "hydra.job.config_name")
SET_IN_SWEEPS = ("hydra.job.id", "hydra.job.num")
SILENT = {
    "hydra.callbacks": "only on_multirun_start and on_multirun_end of a sweep are called",
    "hydra.job_logging": "the output of a run is in its directory `logs`",
    "hydra.hydra_logging": "the output of a run is in its directory `logs`",
    "hydra.verbose": "the output of a run is in its directory `logs`",
}
"""Hydra's keys that have no effect, or less than they promise -> the reason."""
ONLY_SWEEPS = ("hydra.sweep.dir", "hydra.sweeper", "hydra.launcher.max_parallel")
"""Hydra's keys that have no effect on a single run."""
UNSET: dict[str, Any] = {
    "hydra.job.chdir": None,
    "hydra.job.env_set": {},
    "hydra.job.env_copy": [],
    "hydra.callbacks": {},
    "hydra.verbose": False,
    "hydra.launcher.max_parallel": None,
    "hydra.sweeper": {"max_batch_size": None, "params": None},
}
"""Neutral values of keys that conf/run.yaml does not set."""


def refuse(config: DictConfig, *, sweep: bool) -> None:
    """Raise ConfigError for a key of Hydra's that would be ignored, and name what to use instead."""
    raw = _raw(config)
    for key in (*SET_BY_HYDRA, *(SET_IN_SWEEPS if sweep else ())):
        if typed := _typed(raw, key):
            raise ConfigError(f"{typed}: meshrunner sets this key for every run; remove the override")
    for key, instead in REFUSED.items():
        if _changed(raw, key):
            raise ConfigError(f"{key}: {instead}")


def without_effect(config: DictConfig, *, sweep: bool) -> list[str]:
    """Return a line for each setting that has no effect on this single run or sweep."""
    raw = _raw(config)
    found = [f"{key} has no effect: {why}" for key, why in SILENT.items() if _changed(raw, key)]
    if sweep:
        if _changed(raw, "hydra.run.dir"):
            found.append("hydra.run.dir has no effect on a sweep; use hydra.sweep.dir")
        if _changed(raw, "objective") and _choice(raw, "hydra.sweeper") == "basic":
            found.append(
                "objective has no effect: the sweep tries every combination; choose another hydra/sweeper to optimise it"
            )
        return found
    shipped, given = ({key: value for key, value in each.items() if key != "hydra"} for each in (_shipped(), raw))
    idle = [key for key, *_ in differences(shipped, given) if affected_by(key, {}) == Affects.SWEEP]
    # Named experiments set a baseline, which does not hurt a single run.
    idle = [key for key in idle if key != "sweep.baseline" or _typed(raw, key)]
    idle += [key for section in ONLY_SWEEPS for key in _changed(raw, section)]
    return [*found, f"{', '.join(idle)}: no effect on a single run; -m makes it a sweep"] if idle else found


def _typed(raw: dict[str, Any], key: str) -> str:
    """Return the override on the command line of a key or of one below it, "" if there is none."""
    given = raw["hydra"]["overrides"]
    typed = [str(override).lstrip("+~") for override in (*given["hydra"], *given["task"])]
    return next((o.partition("=")[0] for o in typed if o.startswith((f"{key}=", f"{key}."))), "")


def _choice(raw: dict[str, Any], key: str) -> Any:
    """Return the chosen option of the group at a key."""
    return raw["hydra"]["runtime"]["choices"].get(key.replace(".", "/"))


def _changed(raw: dict[str, Any], key: str) -> list[str]:
    """Return a key or the keys below it whose values differ from the neutral ones."""
    if key in ("hydra.job_logging", "hydra.hydra_logging"):
        return [key] if _choice(raw, key) != "none" or _typed(raw, key) else []
    if key == "hydra.sweeper" and _choice(raw, key) != "basic":
        return ["hydra/sweeper"]
    default, value = UNSET[key] if key in UNSET else _at(_shipped(), key), _at(raw, key)
    if key == "hydra.sweeper" and isinstance(value, dict):
        value = {name: each for name, each in value.items() if name != "_target_"}
    return [name for name, *_ in differences(default, value, key)] if value or default else []


@cache
def _shipped() -> dict[str, Any]:
    """Return conf/run.yaml."""
    return _raw(OmegaConf.create(files("meshrunner.conf").joinpath("run.yaml").read_text()))


def _raw(config: Any) -> dict[str, Any]:
    """Return a configuration as dicts, without resolving interpolations."""
    found = OmegaConf.to_container(config, resolve=False)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config

"""Refuse or warn about settings that have no effect, such as Hydra's keys for features that meshrunner replaces."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from meshrunner.recipes.config_keys import affected_by, flatten
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects
from meshrunner.runner import shipped
from meshrunner.runner.config.hydra.private import BASIC_SWEEPER

REFUSED = {
    "hydra.job.chdir": "workers run in the current directory",
    "hydra.job.env_copy": "workers inherit the environment of the command; use launch.env.NAME=VALUE to add to it",
    "hydra.job.env_set": "use launch.env.NAME=VALUE to set the environment of the workers",
    "hydra.output_subdir": "config.yaml and overrides.yaml are written to the run directory itself",
    "hydra.sweep.subdir": "a sweep names each run after its number and the values that vary",
}
"""Hydra keys that cause an error, mapped to the reason in the message. The keys affect only Hydra's unused task function."""
SET_BY_HYDRA = ("hydra.runtime", "hydra.overrides", "hydra.job.override_dirname", "hydra.job.config_name")
SET_IN_SWEEPS = ("hydra.job.id", "hydra.job.num")
LOGS = "meshrunner writes the output of a run to `logs` in the run directory"
SILENT = {
    "hydra.callbacks": "meshrunner calls only the methods on_multirun_start and on_multirun_end, and only in a sweep",
    "hydra.job_logging": LOGS,
    "hydra.hydra_logging": LOGS,
    "hydra.verbose": LOGS,
}
"""Hydra keys that do nothing in meshrunner, or less than Hydra's documentation says. Each is mapped to the reason that the
warning gives."""
ONLY_SWEEPS = ("hydra.sweep.dir", "hydra.sweeper", "hydra.launcher.max_parallel")
SET_BY_TUNE = ("sweep.repeat", "sweep.seeds", "sweep.baseline")
SWEEPER = "hydra.runtime.choices.hydra/sweeper"
NEUTRAL = {"hydra.sweeper._target_": BASIC_SWEEPER, "hydra.job_logging.version": 1, "hydra.hydra_logging.version": 1}
"""Default values of the Hydra keys that conf/run.yaml does not set. A key with its default value causes no warning."""


def refuse(config: DictConfig, *, sweep: bool) -> None:
    """Raise ConfigError if the user changed one of Hydra's keys that meshrunner sets itself or does not support."""
    given = _flat(config)
    for key in (*SET_BY_HYDRA, *(SET_IN_SWEEPS if sweep else ())):
        if typed := _typed(given, key):
            raise ConfigError(f"{typed}: meshrunner sets this key for every run; remove the override")
    for key, instead in REFUSED.items():
        if _changed(given, key):
            raise ConfigError(f"{key}: not supported; {instead}")


def without_effect(config: DictConfig, *, sweep: bool) -> list[str]:
    """Return a warning for each setting that has no effect on this single run or sweep."""
    given = _flat(config)
    found = [f"{key} has no effect: {why}" for key, why in SILENT.items() if _changed(given, key)]
    if sweep:
        if _changed(given, "hydra.run.dir"):
            found.append("hydra.run.dir has no effect on a sweep; use hydra.sweep.dir")
        if given[SWEEPER] == "tune":
            idle, why = [*SET_BY_TUNE], "tune itself decides which runs to repeat"
        else:
            idle = [key for key in given if key.startswith("tune.")]
            why = "use `meshrunner tune` to search for the fastest combination"
        found += [f"{key} has no effect: {why}" for key in idle if _changed(given, key)]
        if _changed(given, "objective") and given[SWEEPER] == "basic":
            found.append(
                "objective has no effect: the sweep tries every combination; use another hydra/sweeper to optimise the objective"
            )
        return found
    idle = [key for key in _changed(given, "") if affected_by(key, given) == Affects.SWEEP]
    # Options of the group `experiment` set sweep.baseline, so warn only if the user typed this key.
    idle = [key for key in idle if key != "sweep.baseline" or _typed(given, key)]
    idle += [key for section in ONLY_SWEEPS for key in _changed(given, section)]
    return [*found, f"{', '.join(idle)}: no effect on a single run; use -m to run a sweep"] if idle else found


def _flat(config: DictConfig) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(config, resolve=False)
    return flatten(found)


def _typed(given: dict[str, Any], key: str) -> str:
    """Return the first key on the command line that is `key` or begins with `key.`; "" if there is none."""
    typed = [str(each).lstrip("+~") for each in (*given["hydra.overrides.hydra"], *given["hydra.overrides.task"])]
    return next((each.partition("=")[0] for each in typed if each.startswith((f"{key}=", f"{key}."))), "")


def _changed(given: dict[str, Any], key: str) -> list[str]:
    """Return the keys at or below `key` whose values differ from their defaults. The values null and [] count as equal."""
    if SILENT.get(key) == LOGS and _typed(given, key):
        return [key]
    if key == "hydra.sweeper" and given[SWEEPER] != "basic":
        return ["hydra/sweeper"]
    known = flatten(shipped.top_level()) | NEUTRAL
    below = [each for each in given if f"{each}.".startswith(f"{key}." if key else "")]
    return [each for each in below if (given[each] or None) != (known.get(each) or None)]

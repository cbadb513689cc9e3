"""Describes a run to trackers: its resolved configuration, devices and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from meshrunner.recipes.affects import affecting
from meshrunner.recipes.config_diff import differences, flatten
from meshrunner.recipes.option import Affects
from meshrunner.runner import shipped
from meshrunner.runner.rundir import Environment, Summary, is_count, options_in_force
from meshrunner.runner.rundir.files import ENVIRONMENT, SUMMARY

TAG_LENGTH = 64
"""Longest tag that W&B accepts, in characters."""


def described(config: dict[str, Any], choices: Mapping[str, str], run_dir: Path) -> dict[str, Any]:
    """
    Return a run's nested configuration with `auto` resolved, and facts about the run as additional keys.

    The facts are `options` (group -> chosen option), `world_size`, `device`, `device_type`, `host`, `commit`, `versions` and
    `directory`. Unknown ones are left out; before the workers have started, most are unknown.
    """
    environment, summary = Environment.read(run_dir / ENVIRONMENT), Summary.read(run_dir / SUMMARY)
    versions = environment.packages | {"python": environment.python}
    facts = {
        "options": options_in_force(choices, environment),
        "world_size": summary.world_size or _devices(config, environment),
        "device": summary.device,
        "device_type": environment.device_type,
        "host": environment.host,
        "commit": environment.git_commit,
        "versions": {package: version for package, version in versions.items() if version} or None,
        "directory": str(run_dir),
    }
    resolved = dict(environment.resolved)
    if (vocabulary := (summary.data or {}).get("tokenizer_vocab")) is not None:
        resolved["data.vocab_size"] = vocabulary
    known = {key: value for key, value in facts.items() if value is not None}
    return _with_values(config, resolved) | known


def _devices(config: dict[str, Any], environment: Environment) -> int | None:
    """Return nodes x workers for a run that ended too early to record a `world_size`, or None if unknown."""
    nodes, workers = _object(config, "launch").get("nodes"), environment.workers
    return nodes * workers if is_count(nodes) and workers is not None else None


def _object(found: dict[str, Any], key: str) -> dict[str, Any]:
    value = found.get(key)
    return dict(value) if isinstance(value, dict) else {}


def _with_values(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested configuration with some values replaced; unknown keys of `values` are ignored."""
    changed = dict(config)
    for key, value in values.items():
        first, _, rest = key.partition(".")
        if first in config:
            inside = changed[first]
            changed[first] = (
                (_with_values(inside, {rest: value}) if isinstance(inside, dict) else inside) if rest else value
            )
    return changed


def in_common(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the nested keys that have the same value in all runs."""
    return reduce(_same, descriptions) if descriptions else {}


def _same(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in one.items():
        if isinstance(value, dict) and isinstance(other.get(key), dict):
            found[key] = _same(value, other[key])
        elif key in other and not differences(value, other[key]):
            found[key] = value
    return found


def tags(choices: Mapping[str, str]) -> list[str]:
    """Return the options that are not the default, as `group=option`."""
    usual = shipped.defaults()
    own = {group: option for group, option in choices.items() if group != "tracker"}
    return [f"{group}={option}"[:TAG_LENGTH] for group, option in own.items() if option != usual.get(group)]


SHOWN = Affects.SPEED | Affects.RESULT | Affects.FIGURES | Affects.CHANCE | Affects.FILES
"""A key with one of these effects is a setting of the run."""
NO_SETTINGS = ("directory", "host", "options", "versions")
"""Facts in a description that are not settings."""


def settings(description: dict[str, Any]) -> dict[str, Any]:
    """
    Return the settings in a description as flat keys, without unknown values.

    The name of an option is listed under its group (`parallelism`) rather than its kind (`parallelism.kind`).
    """
    options, versions = _object(description, "options"), _object(description, "versions")
    flat = flatten({key: value for key, value in description.items() if key not in NO_SETTINGS})
    shown = affecting(flat, SHOWN) | affecting(options, SHOWN)
    shown |= {"torch": versions.get("torch"), "meshrunner": versions.get("meshrunner")}
    kinds = {f"{group}.kind" for group in options}
    return {key: value for key, value in shown.items() if value is not None and key not in kinds}

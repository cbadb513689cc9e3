"""Reads the data that trackers log about runs and sweeps: the settings, and other facts such as the device."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Self

from meshrunner.recipes.config_keys import affecting, differences, flatten, value_at, with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects
from meshrunner.runner import shipped
from meshrunner.runner.rundir import (
    Environment,
    Summary,
    Tracking,
    options_in_force,
    read_config,
    read_overrides,
    read_status,
    sweep_title,
)
from meshrunner.runner.rundir.files import ENVIRONMENT, SUMMARY, is_sweep, tracking


@dataclass(frozen=True)
class RunRecord:
    """Data about a run, collected for trackers."""

    run_dir: Path
    config: dict[str, Any]
    """The resolved configuration, nested as in config.yaml."""
    choices: dict[str, str]
    """The chosen option of each group: {"parallelism": "fsdp2", ...}."""
    tags: list[str]
    name: str
    group: str | None
    """Date and varying keys of the run's sweep, such as `2026-01-31 14:05 parallelism x lr`; None for a single run."""
    attempt: int
    """Number of the current attempt, counted from 1. The first attempt starts the run, and later attempts resume it."""
    run_id: str
    """Hexadecimal id of the run, the same for all attempts."""

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """Read a run directory. Write a new `run_id` to tracker.json if the file has none."""
        run_dir = run_dir.resolve()
        choices = read_overrides(run_dir).choices
        return cls(
            run_dir=run_dir,
            config=read_config(run_dir),
            choices=choices,
            tags=tags(choices),
            name=run_dir.name,
            group=sweep_title(run_dir.parent) if is_sweep(run_dir.parent) else None,
            attempt=read_status(run_dir).attempt or 1,
            run_id=ensure_run_id(run_dir),
        )

    def describe(self) -> dict[str, Any]:
        """Return the run's settings and the facts known so far. After the first step of an attempt, all facts are known."""
        return described(self.config, self.choices, self.run_dir)


@dataclass(frozen=True)
class SweepRecord:
    """Data about an ended sweep, collected for trackers."""

    sweep_dir: Path
    group: str
    """Title of the sweep, under which a tracker groups the sweep's runs."""
    config: dict[str, Any]
    """The resolved configuration of the first run."""
    shared: dict[str, Any]
    """Settings and facts that all started runs share, plus the varying keys, the baseline and the number of runs."""
    tags: list[str]
    """Tags that all runs have."""
    rows: list[dict[str, Any]]
    """Rows of the comparison table, in the format of `meshrunner compare --json`."""
    findings: list[str]
    """The sentences that `meshrunner compare` prints above the table."""
    run_id: str
    """Id under which trackers store the table. A resumed sweep keeps the id."""

    @classmethod
    def load(cls, sweep_dir: Path) -> Self:
        """Read a sweep directory. Raise ConfigError if the directory contains no readable run."""
        from meshrunner.runner.compare.comparison import compare_sweep
        from meshrunner.runner.compare.export import records
        from meshrunner.runner.compare.findings import findings

        sweep_dir = sweep_dir.resolve()
        comparison, _ = compare_sweep(sweep_dir)
        readable = [run for run in comparison.runs if run.config]
        if not readable:
            raise ConfigError(f"{sweep_dir} contains no readable run")
        first = min(readable, key=lambda run: run.path)
        started = [run for run in readable if run.environment] or readable  # skipped runs have no values for `auto`
        shared = reduce(in_common, [described(run.config, run.choices, run.path) for run in started])
        shared |= {"varies": comparison.keys, "runs": len(comparison.runs)}
        shared |= {"baseline": "=".join(comparison.baseline)} if comparison.baseline else {}
        return cls(
            sweep_dir=sweep_dir,
            group=sweep_title(sweep_dir),
            config=first.config,
            shared=shared,
            tags=[tag for tag in tags(first.choices) if all(tag in tags(run.choices) for run in readable)],
            rows=records(comparison),
            findings=findings(comparison),
            run_id=ensure_run_id(sweep_dir),
        )


def ensure_run_id(folder: Path) -> str:
    """Return the id in the tracker.json of a run or sweep. If the file has no id, generate an id and write it to the file."""
    run_id = Tracking.read(tracking(folder)).run_id
    if run_id is None:
        run_id = secrets.token_hex(4)
        update_tracking(folder, run_id=run_id)
    return run_id


def update_tracking(folder: Path, member: str = "", **changes: Any) -> None:
    """Change keys of a tracker's recorded state, such as `phase`."""
    path = tracking(folder, member)
    (Tracking.read(path) | changes).write(path)


def described(config: dict[str, Any], choices: Mapping[str, str], run_dir: Path) -> dict[str, Any]:
    """Return a run's configuration and the facts known so far, such as `device`. Replace each `auto` by the resolved value."""
    environment, summary = Environment.read(run_dir / ENVIRONMENT), Summary.read(run_dir / SUMMARY)
    versions = environment.packages | {"python": environment.python}
    facts = {
        "options": options_in_force(choices, environment),
        "world_size": summary.world_size,
        "device": summary.device,
        "device_type": environment.device_type,
        "host": environment.host,
        "commit": environment.git_commit,
        "versions": {package: version for package, version in versions.items() if version} or None,
        "directory": str(run_dir),
    }
    if summary.world_size is None and environment.workers is not None:  # the run ended before world_size was recorded
        facts["world_size"] = config["launch"]["nodes"] * environment.workers
    resolved = environment.resolved | {"data.vocab_size": (summary.data or {}).get("tokenizer_vocab")}
    for key, value in resolved.items():
        if value is not None and value_at(config, key) is not ...:
            config = with_value(config, key, value)
    return config | {key: value for key, value in facts.items() if value is not None}


def in_common(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the common part of two nested configurations: the keys that have equal values in both configurations."""
    found = {}
    for key, value in one.items():
        if isinstance(value, dict) and isinstance(other.get(key), dict):
            found[key] = in_common(value, other[key])
        elif key in other and not differences(value, other[key]):
            found[key] = value
    return found


def tags(choices: Mapping[str, str]) -> list[str]:
    """Return a tag `group=option` for each option that is not its group's default. Cut tags to 64 characters, W&B's limit."""
    usual = shipped.defaults()
    own = {group: option for group, option in choices.items() if group != "tracker"}
    return [f"{group}={option}"[:64] for group, option in own.items() if option != usual.get(group)]


def settings(description: dict[str, Any]) -> dict[str, Any]:
    """Flatten the result of `described` to keys such as `optimizer.lr`. Omit unknown values, and settings without effect."""
    options, versions = description.get("options", {}), description.get("versions", {})
    no_settings = ("directory", "host", "options", "versions")
    flat = flatten({key: value for key, value in description.items() if key not in no_settings})
    effects = Affects.SPEED | Affects.RESULT | Affects.FIGURES | Affects.CHANCE | Affects.FILES
    shown = affecting(flat, effects) | affecting(options, effects)
    shown |= {"torch": versions.get("torch"), "meshrunner": versions.get("meshrunner")}
    kinds = {f"{group}.kind" for group in options}
    return {key: value for key, value in shown.items() if value is not None and key not in kinds}

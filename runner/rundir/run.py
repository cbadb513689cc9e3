"""A run directory: writing a new one, reading its configuration and overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.rundir.files import CONFIG, LOGS, OVERRIDES, PLAN, STATUS, is_run, write_json
from meshrunner.runner.rundir.states import is_count


def place_run(
    config: dict[str, Any], run_dir: Path, overrides: dict[str, Any], plan: dict[str, Any] | None = None
) -> None:
    """
    Write a new run directory, state `pending`.

    Args:
        config: the resolved configuration; `auto` values stay `auto`.
        overrides: the content of overrides.yaml.
        plan: what is predicted of it, if anything is.

    Raises:
        ConfigError: the directory already holds a run, or cannot be written.
    """
    from omegaconf import OmegaConf  # here: workers import this module, too, and start faster without it

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if is_run(run_dir):
            raise ConfigError(
                f"{run_dir} holds a run already. `meshrunner resume {run_dir}` continues it; for a new run choose another "
                "hydra.run.dir"
            )
        (run_dir / LOGS).mkdir(exist_ok=True)
        (run_dir / OVERRIDES).write_text(OmegaConf.to_yaml(OmegaConf.create(overrides)))
        write_json(run_dir / STATUS, {"state": "pending", "reason": "", "attempt": 0})
        if plan:
            write_json(run_dir / PLAN, plan)
        (run_dir / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(config)))  # last: now it is a run
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {run_dir}: {error.strerror}") from None


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration in a run directory; raises ConfigError when there is none or it is not a YAML mapping."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from meshrunner.runner.rundir.plain_yaml import load_yaml

    path = run_dir / CONFIG
    try:
        load_yaml(path)  # OmegaConf follows aliases, and reads a sentence as a key without a value
        loaded = OmegaConf.to_container(OmegaConf.create(path.read_text()), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def load_config(run_dir: Path) -> dict[str, Any]:
    """What config.yaml holds, not resolved. Raises ValueError that says how it is damaged, and OSError."""
    from meshrunner.runner.rundir.plain_yaml import load_yaml

    config = load_yaml(run_dir / CONFIG)
    if not is_count(config.get("steps")):  # it was cut off, or is somebody else's
        raise ValueError("it has no number of steps")
    return config


def key_of(override: str) -> str:
    """`a.b` of `+a.b=1`, `~a.b` and the like."""
    return override.partition("=")[0].lstrip("+~")


def options_in_force(choices: Mapping[str, str], environment: dict[str, Any]) -> dict[str, str]:
    """The chosen options, `precision=auto` as what it was where the run started. environment: the content of environment.json."""
    resolved = environment.get("resolved")
    became = resolved.get("precision.kind") if isinstance(resolved, dict) else None
    return {
        group: str(became) if became and (group, option) == ("precision", "auto") else option
        for group, option in choices.items()
    }


@dataclass(frozen=True)
class Overrides:
    """The content of overrides.yaml."""

    choices: dict[str, str]
    """Group -> name of the chosen option, without empty groups."""
    task: tuple[str, ...]
    """The overrides that the user typed."""


def load_overrides(run_dir: Path) -> Overrides:
    """The overrides of a run; empty where the file is missing. Raises ValueError that says how it is damaged, and OSError."""
    from meshrunner.runner.rundir.plain_yaml import load_yaml

    try:
        found = load_yaml(run_dir / OVERRIDES)
    except FileNotFoundError:
        found = {}
    choices, task = found.get("choices") or {}, found.get("task") or []
    if not isinstance(choices, dict) or not isinstance(task, list):
        raise ValueError("it is not a list of overrides and a choice of each group")
    return Overrides(
        {
            str(group): str(option)
            for group, option in choices.items()
            if option is not None and not str(group).startswith("hydra/")
        },
        tuple(map(str, task)),
    )


def read_overrides(run_dir: Path) -> Overrides:
    """The overrides of a run; empty where the file is missing or damaged."""
    try:
        return load_overrides(run_dir)
    except (OSError, ValueError):
        return Overrides({}, ())

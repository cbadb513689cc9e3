"""Write a run directory, and read its configuration and overrides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import read_regular
from meshrunner.runner.rundir.files import CONFIG, LOGS, OVERRIDES, PLAN, RECORD_BYTES, STATUS, is_run
from meshrunner.runner.rundir.records import Environment, PlanRecord, unreadable
from meshrunner.runner.rundir.states import Status, is_count


def place_run(
    config: dict[str, Any], run_dir: Path, overrides: dict[str, Any], plan: Mapping[str, Any] | None = None
) -> None:
    """Create the directory of a run in state `pending`. Raise ConfigError if `run_dir` holds a run or cannot be written."""
    from omegaconf import OmegaConf  # not at the top: workers import this module and start faster without it

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if is_run(run_dir):
            raise ConfigError(
                f"{run_dir} holds a run already. `meshrunner resume {run_dir}` continues that run; for a new run, choose "
                "another hydra.run.dir"
            )
        (run_dir / LOGS).mkdir(exist_ok=True)
        (run_dir / OVERRIDES).write_text(OmegaConf.to_yaml(OmegaConf.create(overrides)))
        Status(state="pending", reason="", attempt=0).write(run_dir / STATUS)
        if plan:
            PlanRecord.model_validate(plan).write(run_dir / PLAN)
        # Write config.yaml last, because this file makes the folder a run directory.
        (run_dir / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {run_dir}: {error.strerror}") from None


def place_again(run_dir: Path, repeat: Path) -> None:
    """Create the run directory `repeat` with a copy of the configuration, overrides and prediction in `run_dir`."""
    plan = PlanRecord.read(run_dir / PLAN).as_json()
    place_run(_load_yaml(run_dir / CONFIG), repeat, _load_yaml(run_dir / OVERRIDES), plan)


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return a run's configuration. Raise ConfigError if config.yaml is missing or is not a YAML mapping."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = run_dir / CONFIG
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.create(_load_yaml(path)), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}") from None
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(unreadable(path, error)) from None
    return {str(key): value for key, value in loaded.items()}


def _load_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raise OSError if the file cannot be read, or ValueError if it is damaged."""
    from meshrunner.runner.rundir.plain_yaml import parse_yaml

    value = parse_yaml(read_regular(path, RECORD_BYTES).decode())
    if not isinstance(value, dict):
        raise ValueError("it is not a mapping")
    return {str(key): each for key, each in value.items()}


def load_config(run_dir: Path) -> dict[str, Any]:
    """Return config.yaml with interpolations unresolved. Raise OSError if the file is unreadable, ValueError if it is damaged."""
    config = _load_yaml(run_dir / CONFIG)
    if not is_count(config.get("steps")):  # truncated, or written by another program
        raise ValueError("`steps` is missing or not a whole number")
    return config


def key_of(override: str) -> str:
    """Return the key of an override: `a.b` for `+a.b=1` and for `~a.b`."""
    return override.partition("=")[0].lstrip("+~")


def options_in_force(choices: Mapping[str, str], environment: Environment) -> dict[str, str]:
    """Return the options in `choices`, but replace `precision=auto` by the precision that the run recorded, if any."""
    known = environment.precision
    return {**choices, "precision": known} if known and choices.get("precision") == "auto" else {**choices}


class Overrides(NamedTuple):
    """The content of overrides.yaml."""

    choices: dict[str, str] = {}
    """Names of the chosen options, keyed by group. Hydra's own groups and groups without a chosen option have no key."""
    task: tuple[str, ...] = ()
    """The overrides that the user typed."""


def load_overrides(run_dir: Path) -> Overrides:
    """Read overrides.yaml, which may be missing. Raise OSError if the file cannot be read, or ValueError if it is damaged."""
    try:
        found = _load_yaml(run_dir / OVERRIDES)
    except FileNotFoundError:
        return Overrides()
    choices, task = found.get("choices") or {}, found.get("task") or []
    if not isinstance(choices, dict) or not isinstance(task, list):
        raise ValueError("`choices` is not a mapping, or `task` is not a list")
    chosen = {str(group): str(option) for group, option in choices.items() if option is not None}
    own = {group: option for group, option in chosen.items() if not group.startswith("hydra/")}
    return Overrides(own, tuple(map(str, task)))


def read_overrides(run_dir: Path) -> Overrides:
    """Return the content of overrides.yaml. The result is empty if the file is missing, unreadable or damaged."""
    try:
        return load_overrides(run_dir)
    except (OSError, ValueError):
        return Overrides()

"""What is on disk about finished and unfinished runs, whatever state the files are in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.figures import number
from meshrunner.runner.rundir.events import StepRow, read_events
from meshrunner.runner.rundir.files import CONFIG, ENVIRONMENT, STATUS, SUMMARY, is_run, read_json
from meshrunner.runner.rundir.layouts import read_layouts
from meshrunner.runner.rundir.owner import owner_is_alive
from meshrunner.runner.rundir.run import read_overrides
from meshrunner.runner.rundir.states import read_status
from meshrunner.runner.rundir.summary import only_of_completed, summarise
from meshrunner.runner.rundir.sweep import run_names

YamlLoader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
"""libyaml's, ten times faster than the one in Python; like OmegaConf's it takes 1e-3 for a number."""
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Run:
    """One run directory, as far as it can be read."""

    path: Path
    config: dict[str, Any]
    """{} when it cannot be read."""
    state: str
    """As in status.json; `damaged` when that or the configuration cannot be read, `missing` for a job without directory."""
    reason: str
    choices: dict[str, str] = field(default_factory=dict)
    """Group -> name of the chosen option."""
    task: tuple[str, ...] = ()
    """The overrides that the user typed."""

    @property
    def typed(self) -> set[str]:
        """Keys that the user gave a value."""
        return {override.lstrip("+~").partition("=")[0] for override in self.task}

    @cached_property
    def events(self) -> list[StepRow]:
        """One row per step; [] when there are none."""
        try:
            return read_events(self.path)
        except OSError:
            return []

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _object(self.path / ENVIRONMENT)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; of a run that has not written its figures (yet), those that follow from its events."""
        return only_of_completed(self._recorded_or_computed(), self.state)

    def _recorded_or_computed(self) -> dict[str, Any]:
        found = _object(self.path / SUMMARY)
        if "perf/wps_median" in found or not self.events:
            return found
        status, after = _object(self.path / STATUS), self.config.get("measure_after")
        after, started = after if isinstance(after, int) else 0, status.get("started") or 0.0
        try:
            figures = summarise(self.events, after, started, status.get("attempt", 1), read_layouts(self.path))
        except (KeyError, TypeError):  # rows that hold something else than figures
            return found
        if not started:
            figures["perf/time_to_first_step_s"] = None
        return found | figures

    def figure(self, key: str) -> float | None:
        """A number of the summary; None where it is not known."""
        return number(self.summary.get(key))

    @property
    def seed(self) -> Any:
        return self.config.get("seed")


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """
    The runs in some run or sweep directories, each once, in the order given and then by name.

    Raises:
        ConfigError: a directory does not exist, or there is no run in it nor one level below.
    """
    found: dict[Path, Path] = {}
    for path in [path for folder in folders for path in _run_dirs(folder)]:
        found.setdefault(path.resolve(), path)
    return [read_run(path) for path in found.values()]


def _run_dirs(folder: Path) -> Iterator[Path]:
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}")
    try:
        if is_run(folder):
            yield folder
            return
        below = {path.parent for path in folder.glob(f"*/{CONFIG}")}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    with suppress(OSError):
        below |= {folder / name for name in run_names(folder)}
    if not below:
        raise ConfigError(f"{folder} is neither a run nor a sweep: no config.yaml in it or in a folder of it")
    yield from sorted(below)


def read_run(path: Path) -> Run:
    """A run directory; what is wrong with it becomes its state and reason."""
    try:
        config = _yaml(path / CONFIG)
    except FileNotFoundError:
        if path.is_dir():
            return Run(path, {}, "damaged", "it has no config.yaml")
        return Run(path, {}, "missing", "sweep.json names it, but there is no such directory")
    except (OSError, ValueError, yaml.YAMLError) as error:
        return Run(path, {}, "damaged", f"config.yaml cannot be read: {_one_line(error)}")
    overrides = read_overrides(path)  # without them the columns are named after keys, not after options
    state, reason = _state(path)
    return Run(path, config, state, reason, overrides.choices, overrides.task)


def _state(path: Path) -> tuple[str, str]:
    try:
        status = read_status(path)
        state, reason = status.get("state"), status.get("reason")
        if not isinstance(state, str):
            return "damaged", "status.json is missing or damaged"
        if state == "running" and not owner_is_alive(status):
            return "stale", "recorded as running, but its process is gone; `meshrunner resume` continues it"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return "damaged", f"status.json cannot be read: {_one_line(error)}"
    return state, _one_line(reason or "")


def _yaml(path: Path) -> dict[str, Any]:
    loaded = yaml.load(path.read_bytes(), YamlLoader)
    if not isinstance(loaded, dict):
        raise ValueError("it is not a mapping")
    return {str(key): value for key, value in loaded.items()}


def _object(path: Path) -> dict[str, Any]:
    """`read_json`, {} also where the file may not be read."""
    try:
        return read_json(path)
    except OSError:
        return {}


def _one_line(text: object) -> str:
    return " ".join(str(text).split())

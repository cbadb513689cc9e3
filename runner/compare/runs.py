"""What is on disk about finished and unfinished runs, whatever state the files are in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage.durable import read_regular
from meshrunner.runner.console import one_line, warn
from meshrunner.runner.figures import number
from meshrunner.runner.rundir.damage import EVENTS_BYTES, find_damage, unreadable
from meshrunner.runner.rundir.events import StepRow, read_events
from meshrunner.runner.rundir.files import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    OVERRIDES,
    STATUS,
    SUMMARY,
    is_run,
    is_sweep,
    read_json,
)
from meshrunner.runner.rundir.layouts import read_layouts
from meshrunner.runner.rundir.owner import owner_is_alive
from meshrunner.runner.rundir.plain_yaml import YAML_BYTES
from meshrunner.runner.rundir.run import Overrides, key_of, load_config, load_overrides
from meshrunner.runner.rundir.states import read_status
from meshrunner.runner.rundir.summary import only_of_completed, predicted, summarise
from meshrunner.runner.rundir.sweep import run_names, sweep_damage

LONGEST_REASON = 2000
"""In characters; what follows is left out."""


@dataclass(frozen=True)
class Run:
    """One run directory, as far as it can be read."""

    path: Path
    config: dict[str, Any]
    """{} when it cannot be read."""
    state: str
    """As in status.json; `damaged` when a file of the run is, `missing` for a job without directory."""
    reason: str
    choices: dict[str, str] = field(default_factory=dict)
    """Group -> name of the chosen option."""
    task: tuple[str, ...] = ()
    """The overrides that the user typed."""

    @property
    def typed(self) -> set[str]:
        """Keys that the user gave a value."""
        return set(map(key_of, self.task))

    @cached_property
    def events(self) -> list[StepRow]:
        """One row per step; [] when there are none, or more than a machine can hold."""
        try:
            return read_events(self.path) if (self.path / EVENTS).lstat().st_size <= EVENTS_BYTES else []
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
        found = _predicted(self.path) | _object(self.path / SUMMARY)
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
    def precision(self) -> str:
        """The kind of `precision`, `auto` resolved as it was where the run started."""
        section, resolved = self.config.get("precision"), self.environment.get("resolved")
        kind = section.get("kind") if isinstance(section, dict) else None
        if kind == "auto" and isinstance(resolved, dict):
            kind = resolved.get("precision.kind", kind)
        return str(kind)

    @property
    def seed(self) -> Any:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else str(seed)


def read_runs(folders: Iterable[Path], read: Callable[[Path], Run] | None = None) -> list[Run]:
    """
    The runs in some run or sweep directories, each once, in the order given and then by name. Warns of a damaged sweep.json.

    Args:
        read: `read_run` or `glance`.

    Raises:
        ConfigError: a directory does not exist, or there is no run in it nor one level below.
    """
    found: dict[str, Path] = {}
    for path in [path for folder in folders for path in _run_dirs(folder)]:
        there = path.parent if _leads_out(path) else path
        found.setdefault(os.path.realpath(there) + ("" if there is path else f"/{path.name}"), path)
    return [(read or read_run)(path) for path in found.values()]


def _run_dirs(folder: Path) -> Iterator[Path]:
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}")
    try:
        if is_run(folder):
            yield folder
            return
        below = {path for path in folder.iterdir() if is_run(path)} if folder.is_dir() else set()
        below |= {folder / name for name in run_names(folder)}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    damage = sweep_damage(folder)
    for each in damage:
        warn(each)
    if not below and not damage:
        raise ConfigError(f"{folder} is neither a run nor a sweep: no config.yaml in it or in a folder of it")
    if not below:
        raise ConfigError(f"{folder} holds no run")
    yield from sorted(below)


def _leads_out(path: Path) -> bool:
    """Whether a run of a sweep is a link; links in other folders were put there by somebody who wants them compared."""
    return path.is_symlink() and is_sweep(path.parent)


def read_run(path: Path) -> Run:
    """A run directory; what is wrong with it becomes its state and reason."""
    state, reason = _state(path)
    if not is_run(path) or _leads_out(path):
        return Run(path, {}, state, reason)
    config: dict[str, Any] = {}
    overrides = Overrides({}, ())  # without them the columns are named after keys, not after options
    name = CONFIG
    try:
        config = load_config(path)
        name = OVERRIDES
        overrides = load_overrides(path)
    except (OSError, ValueError) as error:
        state, reason = "damaged", _short(unreadable(name, error))
    return Run(path, config, state, reason, overrides.choices, overrides.task)


def glance(path: Path) -> Run:
    """
    A run as `read_run` reads it, but of the configuration `steps` and `measure_after` alone, and no option that was chosen.

    Its YAML takes most of the time, and is needed only where no summary is written yet.
    """
    state, reason = _state(path)
    if state in ("damaged", "missing"):
        return Run(path, {}, state, reason)
    try:
        found = dict(COUNTS.findall(read_regular(path / CONFIG, YAML_BYTES)))
        measured = "perf/wps_median" in read_json(path / SUMMARY) or not (path / EVENTS).stat().st_size
    except FileNotFoundError:
        measured = True
    except (OSError, ValueError):
        return read_run(path)
    if len(found) < 2 or not measured:
        return read_run(path)
    return Run(path, {key.decode(): int(value) for key, value in found.items()}, state, reason)


COUNTS = re.compile(rb"^(steps|measure_after): (\d{1,15})$", re.MULTILINE)
"""Two numbers of config.yaml, as every version has written them."""


def _state(path: Path) -> tuple[str, str]:
    """State and reason; `damaged` as far as one sees without the YAML."""
    if _leads_out(path):
        return "damaged", "it is a link; the runs of a sweep are folders in it"
    if not path.is_dir():
        return "missing", "sweep.json names it, but there is no such directory"
    if not is_run(path):
        return "damaged", "it has no config.yaml"
    if damage := find_damage(path):
        return "damaged", _short(damage)
    status = read_status(path)
    state, reason = status.get("state"), status.get("reason")
    if state is None:
        return "damaged", "status.json is missing, or names no state"
    if state == "running" and not owner_is_alive(status):
        return "stale", "recorded as running, but its process is gone; `meshrunner resume` continues it"
    return str(state), _short(reason or "")


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]} ..."


def _predicted(path: Path) -> dict[str, Any]:
    """What was predicted of a run, which one that never began has no summary to say in."""
    try:
        return predicted(path)
    except OSError:
        return {}


def _object(path: Path) -> dict[str, Any]:
    """`read_json`, {} also where the file may not be read."""
    try:
        return read_json(path)
    except OSError:
        return {}

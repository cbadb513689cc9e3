"""Read finished and unfinished runs from disk, whatever condition their files are in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage.durable import read_regular
from meshrunner.runner.console import one_line, warn
from meshrunner.runner.rundir import (
    EVENTS_BYTES,
    Environment,
    Inspection,
    JsonFile,
    Overrides,
    Status,
    StepRow,
    Summary,
    inspect,
    key_of,
    load_config,
    load_overrides,
    only_of_completed,
    owner_is_alive,
    predicted,
    read_events,
    read_layouts,
    run_names,
    summarise,
    sweep_damage,
    unreadable,
)
from meshrunner.runner.rundir.files import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    OVERRIDES,
    STATUS,
    SUMMARY,
    YAML_BYTES,
    is_run,
    is_sweep,
)

LONGEST_REASON = 2000
"""Characters of a reason that are shown."""
MEASURED = "perf/wps_median"
"""A key that a summary has once the run's figures are written."""
COUNTS = re.compile(rb"^(steps|measure_after): (\d{1,15})$", re.MULTILINE)
"""The lines of two numbers in config.yaml, as every version has written them."""

R = TypeVar("R", bound=JsonFile)
UNREAD = Inspection("nothing was read")


@dataclass(frozen=True)
class Run:
    """One run directory, as far as it can be read."""

    path: Path
    config: dict[str, Any]
    """{} if it cannot be read."""
    state: str
    """
    The state in status.json, or `damaged` if a file is, `missing` if the directory of a sweep's run is, `stale` if the process is
    gone.
    """
    reason: str
    choices: dict[str, str] = field(default_factory=dict)
    """Group -> name of the chosen option."""
    task: tuple[str, ...] = ()
    """The overrides that the user typed."""
    inspection: Inspection = field(default=UNREAD, repr=False)

    @property
    def typed(self) -> set[str]:
        """Keys that the user gave a value."""
        return set(map(key_of, self.task))

    @cached_property
    def events(self) -> list[StepRow]:
        """One row per step; [] if there are none, or the file cannot be read or is too large."""
        try:
            return read_events(self.path) if (self.path / EVENTS).lstat().st_size <= EVENTS_BYTES else []
        except OSError:
            return []

    @cached_property
    def environment(self) -> Environment:
        """The content of environment.json."""
        return self._record(Environment, ENVIRONMENT)

    @cached_property
    def summary(self) -> Summary:
        """The content of summary.json. Until the run has written its figures, they are computed from its events."""
        return only_of_completed(self._recorded_or_computed(), self.state)

    @property
    def figures(self) -> dict[str, float | None]:
        """The figures of the summary."""
        return self.summary.figures

    def _recorded_or_computed(self) -> Summary:
        found = self._record(Summary, SUMMARY)
        found = plan | found if (plan := predicted(self.path)) else found
        if MEASURED in found.figures or not self.events:
            return found
        status, after = self._record(Status, STATUS), self.config.get("measure_after")
        after, started = after if isinstance(after, int) else 0, status.started or 0.0
        computed = summarise(self.events, after, started, status.attempt or 1, read_layouts(self.path))
        return found | computed | ({} if started else {"perf/time_to_first_step_s": None})

    def _record(self, kind: type[R], name: str) -> R:
        """Return a record that was read with the run. For a damaged run, read the file again if it can be read."""
        return kind.peek(self.path / name) if self.inspection.damage else self.inspection.record(kind)

    def figure(self, key: str) -> float | None:
        """Return a figure of the summary; None if it is unknown."""
        return self.figures.get(key)

    @property
    def precision(self) -> str:
        """The kind of `precision`; for `auto`, the kind that was chosen when the run started."""
        section = self.config.get("precision")
        kind = section.get("kind") if isinstance(section, dict) else None
        return str(self.environment.precision or kind if kind == "auto" else kind)

    @property
    def seed(self) -> Any:
        """The seed of the run."""
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else str(seed)


def read_runs(folders: Iterable[Path], read: Callable[[Path], Run] | None = None) -> list[Run]:
    """
    Return the runs in run and sweep directories, each once, in the order given and then by name. Warn about damaged sweep.json.

    Args:
        read: `read_run` (the default) or `glance`.

    Raises:
        ConfigError: a directory does not exist, or is not a run and holds none.
    """
    found: dict[str, Path] = {}
    for path in [path for folder in folders for path in _run_dirs(folder)]:
        there = path.parent if _leads_out(path) else path
        found.setdefault(os.path.realpath(there) + ("" if there is path else f"/{path.name}"), path)
    return [(read or read_run)(path) for path in found.values()]


def _run_dirs(folder: Path) -> Iterator[Path]:
    if not folder.exists():
        raise ConfigError(f"no such directory: {folder}")
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
        raise ConfigError(f"{folder} is neither a run nor a sweep: there is no config.yaml in it or one level below")
    if not below:
        raise ConfigError(f"{folder} holds no runs")
    yield from sorted(below)


def _leads_out(path: Path) -> bool:
    """Return whether a run of a sweep is a link. Links in other folders are there to compare their targets."""
    return path.is_symlink() and is_sweep(path.parent)


def read_run(path: Path) -> Run:
    """Read a run directory. If it is damaged, the state and reason say how."""
    state, reason, inspection = _state(path)
    if not is_run(path) or _leads_out(path):
        return Run(path, {}, state, reason, inspection=inspection)
    config: dict[str, Any] = {}
    overrides = Overrides({}, ())  # without them, columns are named after keys, not options
    name = CONFIG
    try:
        config = load_config(path)
        name = OVERRIDES
        overrides = load_overrides(path)
    except (OSError, ValueError) as error:
        state, reason = "damaged", _short(unreadable(name, error))
    return Run(path, config, state, reason, overrides.choices, overrides.task, inspection)


def glance(path: Path) -> Run:
    """
    Read a run like `read_run`, but only `steps` and `measure_after` of its configuration, and no chosen options.

    Parsing YAML takes most of the time, and is needed only until the summary is written.
    """
    state, reason, inspection = _state(path)
    if state in ("damaged", "missing"):
        return Run(path, {}, state, reason, inspection=inspection)
    try:
        found = dict(COUNTS.findall(read_regular(path / CONFIG, YAML_BYTES)))
        measured = MEASURED in inspection.record(Summary).figures or not (path / EVENTS).stat().st_size
    except FileNotFoundError:
        measured = True
    except (OSError, ValueError):
        return read_run(path)
    if len(found) < 2 or not measured:
        return read_run(path)
    config = {key.decode(): int(value) for key, value in found.items()}
    return Run(path, config, state, reason, inspection=inspection)


def _state(path: Path) -> tuple[str, str, Inspection]:
    """Return state, reason and records. The state is `damaged` if a file other than the YAML ones is."""
    if _leads_out(path):
        return "damaged", "it is a link; the runs of a sweep must be directories", UNREAD
    if not path.is_dir():
        return "missing", "sweep.json lists it, but there is no such directory", UNREAD
    if not is_run(path):
        return "damaged", "it has no config.yaml", UNREAD
    inspection = inspect(path)
    status = inspection.record(Status)
    if inspection.damage:
        return "damaged", _short(inspection.damage), inspection
    if status.state is None:
        return "damaged", "status.json is missing or has no state", inspection
    if status.state == "running" and not owner_is_alive(status):
        return "stale", "recorded as running, but its process is gone; `meshrunner resume` continues it", inspection
    return status.state, _short(status.reason), inspection


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]} ..."

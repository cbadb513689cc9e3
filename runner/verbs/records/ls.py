"""`meshrunner ls`: list the runs and sweeps below a directory, newest first."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from meshrunner.recipes.config_keys import flatten
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import existing, parse
from meshrunner.runner.compare.runs import glance, read_run
from meshrunner.runner.compare.select import Field, last_part, meeting, parsed
from meshrunner.runner.compare.text_table import Column, fitted, lines_of
from meshrunner.runner.console import console, counted, on_terminal, one_line, say, shown
from meshrunner.runner.figures import UNKNOWN, figure_of
from meshrunner.runner.rundir import Status, key_of, parse_yaml, read_overrides, run_names, varying_overrides
from meshrunner.runner.rundir.files import CONFIG, SWEEP, is_run, is_sweep

WPS = figure_of("perf/wps")
DEPTH = 8
"""Number of directory levels to search."""
LATEST = 2.0**32
"""Latest Unix time to show, in seconds. A damaged file may contain a time that `datetime` cannot represent."""
WIDEST_WHAT = 72
"""Maximum number of characters in the column `what` on a terminal."""


@dataclass(frozen=True)
class Entry:
    """A run or sweep to list."""

    path: Path
    is_sweep: bool
    began: datetime
    """Time at which the first run began or, if no run has begun, at which the directory was written."""
    states: Counter[str]
    wps: float | None
    """WPS (tokens per second) per device of the fastest completed run; None if no completed run has a known WPS."""

    @cached_property
    def what(self) -> str:
        """Description of a sweep (`12 runs: parallelism, micro_batch`), or the overrides of a single run."""
        if not self.is_sweep:
            return " ".join(each for each in read_overrides(self.path).task if not each.startswith("hydra.run.dir="))
        count = self.states.total()
        keys = dict.fromkeys(last_part(key_of(each)) for own in varying_overrides(self.path).values() for each in own)
        return counted(count, "run") + (f": {', '.join(keys)}" if keys else "")

    @property
    def state(self) -> str:
        """State of a single run (`completed`), or number of a sweep's runs in each state (`11 completed, 1 oom`)."""
        if not self.is_sweep:
            return next(iter(self.states))
        return ", ".join(f"{count} {state}" for state, count in self.states.items())

    @cached_property
    def settings(self) -> dict[str, list[Any]]:
        """Values of each key or group. The first run's value comes first, then the values of overrides that vary between runs."""
        names = run_names(self.path) if self.is_sweep else [""]
        run = read_run(self.path / names[0]) if names else None
        found = {key: [value] for key, value in ((flatten(run.config) | run.choices) if run else {}).items()}
        for own in varying_overrides(self.path).values():
            for override in own:
                value: Any = override.partition("=")[2]
                with suppress(ValueError):
                    value = parse_yaml(value)
                found.setdefault(key_of(override), []).append(value)
        return found


def ls(arguments: list[str]) -> int:
    """List runs and sweeps. Raise ConfigError if arguments are invalid or a directory does not exist."""
    given = parse("ls", arguments)
    if given.limit < 0:
        raise ConfigError(f"--limit: expected a number of at least 0, got {given.limit}")
    usual = [path for name in ("runs", "sweeps") if (path := Path(name)).is_dir()]
    directories = given.directories or usual or [Path()]
    entries = sorted(map(_read, below(directories)), key=lambda entry: entry.began, reverse=True)
    fields = _fields(entries, given.where)
    chosen = [entries[i] for i in meeting(given.where, fields, len(entries))] if entries else []
    listed = chosen[: given.limit or None]
    if given.json:
        print(json.dumps([_record(entry) for entry in listed], indent=2, default=str))
    elif listed:
        _print(listed)
    if not entries:
        say(f"no runs below {', '.join(map(str, directories))}", to_stderr=True)
    elif not chosen:
        say(f"none of the {len(entries)} runs and sweeps meets {' and '.join(given.where)}", to_stderr=True)
    elif len(listed) < len(chosen):
        say(f"listed {len(listed)} of {len(chosen):,}; --limit 0 lists all", to_stderr=True)
    return 0


def below(directories: Iterable[Path]) -> list[Path]:
    """Return the run and sweep directories at or below the given ones. Raise ConfigError if a given one does not exist."""
    return list(dict.fromkeys(path for each in map(existing, directories) for path in _found(each, DEPTH)))


def _found(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run and sweep directories at or below a directory. Do not search inside a run or sweep directory."""
    with suppress(OSError):
        if is_sweep(folder) or is_run(folder):
            yield folder
            return
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)]
        for path in below if depth else ():
            yield from _found(Path(path), depth - 1)


def _read(path: Path) -> Entry:
    sweep = is_sweep(path)
    runs = [glance(path / name) for name in run_names(path)] if sweep else [glance(path)]
    starts = [started for run in runs if run.state != "damaged" and (started := run.record(Status).started)]
    speeds = [run.figures.get(WPS.summary_keys[0]) for run in runs if run.state == "completed"]
    try:
        written = (path / (SWEEP if sweep else CONFIG)).lstat().st_mtime
    except OSError:
        written = 0.0
    began = local_time(min(starts, default=written))
    fastest = max((speed for speed in speeds if speed is not None), default=None)
    return Entry(path, sweep, began, Counter(run.state for run in runs), fastest)


def local_time(seconds: float) -> datetime:
    """Return the local time of a Unix time, limited to times that can be shown."""
    return datetime.fromtimestamp(min(max(0.0, seconds), LATEST)).astimezone()


def _fields(entries: Sequence[Entry], where: Sequence[str]) -> dict[str, Field]:
    """Return the fields that `--where` can name. Read the runs' settings only if a condition uses a setting."""
    found = {
        "state": Field([list(entry.states) for entry in entries], open=True),
        "wps": Field([[entry.wps] for entry in entries], open=True),
        "runs": Field([[entry.states.total()] for entry in entries], open=True),
    }
    if {parsed(each).key for each in where} <= found.keys():
        return found
    for name in dict.fromkeys(name for entry in entries for name in entry.settings):
        values = [entry.settings.get(name, []) for entry in entries]
        found.setdefault(name, Field(values, constant="." in name))
    return found


def _record(entry: Entry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "type": "sweep" if entry.is_sweep else "run",
        "began": entry.began.isoformat(timespec="seconds"),
        "what": entry.what,
        "states": dict(entry.states),
        "best_wps": entry.wps,
    }


def _print(entries: Sequence[Entry]) -> None:
    titles = ("began", "what", "state", "best WPS", "path")
    rows = [
        [f"{each.began:%Y-%m-%d %H:%M}", each.what, each.state, WPS.text(each.wps, UNKNOWN), str(shown(each.path))]
        for each in entries
    ]
    if not on_terminal():
        say("\n".join(lines_of([Column(title, list(cells)) for title, *cells in zip(titles, *rows, strict=True)])))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles[:-1]:
        table.add_column(title, overflow="fold", no_wrap=title != "what")
    for began, *texts in rows:
        what, state, wps, path = map(one_line, texts)
        table.add_row(began, f"{fitted(what, WIDEST_WHAT)}\n{path}", state.replace(", ", "\n"), wps)
    console().print(table)

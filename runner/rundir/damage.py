"""Find what is wrong with a run directory: something else in place of a file or folder, or content that cannot be used."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshrunner.recipes.storage.durable import KINDS, check_regular, open_regular
from meshrunner.runner.rundir import files
from meshrunner.runner.rundir.events import LONGEST_ROW, parse_rows
from meshrunner.runner.rundir.layouts import Layouts
from meshrunner.runner.rundir.records import Environment, Failure, JsonFile, PlanRecord, Submission, Tracking
from meshrunner.runner.rundir.run import load_config, load_overrides
from meshrunner.runner.rundir.states import Status
from meshrunner.runner.rundir.summary import Summary

EVENTS_BYTES = 512 << 20
"""Largest events.jsonl that is read: about a million steps."""


R = TypeVar("R", bound=JsonFile)


class Inspection(NamedTuple):
    """The records of a run directory up to the first that is damaged."""

    damage: str
    """Why the directory is damaged, its YAML aside; "" if it is not."""
    found: Sequence[object] = ()

    def record(self, kind: type[R]) -> R:
        """Return the record of a file; an empty one if there is no such file."""
        return next((each for each in self.found if type(each) is kind), None) or kind()


def inspect(run_dir: Path) -> Inspection:
    """Read a run directory, except for its rows and its YAML."""
    return _inspect(run_dir, FILE_CHECKS | FOLDER_CHECKS)


def find_obstacle(run_dir: Path) -> str:
    """Return what is in the way of a run that writes: a pipe, device, link or folder for a file, or a file for a folder."""
    return _inspect(run_dir, dict.fromkeys(FILE_CHECKS, check_regular) | FOLDER_CHECKS).damage


def find_damage(run_dir: Path, names: Iterable[str] = ()) -> str:
    """
    Return why a run directory is damaged, its YAML aside; "" if it is not.

    Args:
        names: the only files to check; none: all.
    """
    return _inspect(run_dir, {name: FILE_CHECKS[name] for name in names} or FILE_CHECKS | FOLDER_CHECKS).damage


def find_yaml_damage(run_dir: Path) -> str:
    """Return what is wrong with the YAML of a run directory; "" if nothing is."""
    return _inspect(run_dir, YAML_CHECKS).damage


def unreadable(name: str, error: OSError | ValueError) -> str:
    """Return a clause for an error that reading a file raised."""
    return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


def _inspect(run_dir: Path, checks: Mapping[str, Callable[[Path], object]]) -> Inspection:
    try:
        present = set(os.listdir(run_dir))  # noqa: PTH208 names, for a thousand runs
    except OSError as error:
        return Inspection(unreadable(run_dir.name, error))
    found = []
    for name in checks:
        if name in present:
            try:
                found.append(checks[name](run_dir / name))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                return Inspection(unreadable(name, error), found)
    return Inspection("", found)


def _check_folder(path: Path) -> None:
    """Raise ValueError unless a path is a folder; the folder of the logs may hold nothing but files and folders."""
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise ValueError(f"it is {KINDS.get(stat.S_IFMT(mode), 'a file')}, not a folder")
    if path.name == files.LOGS:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
                    raise ValueError(f"{entry.name} in it is not a file")


def _check_events(path: Path) -> None:
    """Raise ValueError if a file holds no row. A damaged line among good ones is no damage: a killed run leaves one."""
    with open_regular(path, EVENTS_BYTES) as file:
        first = file.read(LONGEST_ROW // 16)
        *lines, _ = first.split(b"\n")
        if len(lines) < 2:  # a short or a long row
            *lines, _ = (first + file.read(LONGEST_ROW)).split(b"\n")
        if (lines or len(first) == LONGEST_ROW // 16) and not any(parse_rows([line]) for line in lines):
            raise ValueError("it holds no step")


FILE_CHECKS: dict[str, Callable[[Path], object]] = {
    files.STATUS: Status.load,
    files.STATUS_LOCK: check_regular,
    files.CONFIG: check_regular,
    files.OVERRIDES: check_regular,
    files.SUMMARY: Summary.load,
    files.EVENTS: _check_events,
    files.ENVIRONMENT: Environment.load,
    files.LAYOUTS: Layouts.load,
    files.PLAN: PlanRecord.load,
    files.ERROR: Failure.load,
    files.TRACKING: Tracking.load,
    files.SLURM_JOB: Submission.load,
    files.SLURM_SETTINGS: JsonFile.load,
}
"""File -> a function that reads it, or raises ValueError or OSError if it is damaged."""
FOLDERS = (files.LOGS, files.TRACES, files.TENSORBOARD, files.WANDB)
FOLDER_CHECKS: dict[str, Callable[[Path], object]] = dict.fromkeys(FOLDERS, _check_folder)
YAML_CHECKS: dict[str, Callable[[Path], object]] = {
    files.CONFIG: lambda path: load_config(path.parent),
    files.OVERRIDES: lambda path: load_overrides(path.parent),
}

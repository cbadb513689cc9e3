"""What is wrong with a run directory: what stands where a file or folder belongs, and what a file holds that it should not."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshrunner.recipes.storage.durable import KINDS, check_regular, open_regular
from meshrunner.runner.figures import FIGURES, number
from meshrunner.runner.rundir.events import LONGEST_ROW, parse_rows
from meshrunner.runner.rundir.files import (
    CONFIG,
    ENVIRONMENT,
    ERROR,
    EVENTS,
    LAYOUTS,
    LOGS,
    OVERRIDES,
    PLAN,
    SLURM_JOB,
    SLURM_SETTINGS,
    STATUS,
    STATUS_LOCK,
    SUMMARY,
    TENSORBOARD,
    TRACES,
    TRACKING,
    WANDB,
    load_json,
)
from meshrunner.runner.rundir.run import load_config, load_overrides
from meshrunner.runner.rundir.states import is_count, load_status

EVENTS_BYTES = 512 << 20
"""Largest events.jsonl that is read: about a million steps."""
JOB_ID = re.compile(r"\d{1,18}(_\d{1,18})?", re.ASCII)
RUN_ID = re.compile(r"[0-9A-Za-z]{1,64}")
FIGURE_KEYS = frozenset(key for figure in FIGURES for key in figure.summary_keys)


def find_obstacle(run_dir: Path) -> str:
    """What stands where a run writes: a pipe, device, link or folder for a file, a file for a folder. Empty for none."""
    return _first_problem(run_dir, dict.fromkeys(CHECKS, _check_file) | FOLDER_CHECKS)


def find_damage(run_dir: Path, names: Iterable[str] = ()) -> str:
    """Why a run directory is damaged, as far as one sees without its YAML; empty for a good one. `names`: of some files alone."""
    return _first_problem(run_dir, {name: CHECKS[name] for name in names} or CHECKS | FOLDER_CHECKS)


def find_yaml_damage(run_dir: Path) -> str:
    """What is wrong with the YAML of a run directory; empty where nothing is."""
    return _first_problem(run_dir, YAML_CHECKS)


def unreadable(name: str, error: OSError | ValueError) -> str:
    """A clause for an error that reading a file raised."""
    return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


def _first_problem(run_dir: Path, checks: Mapping[str, Callable[[Path], object]]) -> str:
    try:
        present = set(os.listdir(run_dir))  # noqa: PTH208 names, for a thousand runs
    except OSError as error:
        return unreadable(run_dir.name, error)
    for name in checks:
        if name in present:
            try:
                checks[name](run_dir / name)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                return unreadable(name, error)
    return ""


def _check_file(path: Path) -> None:
    check_regular(path)


def _check_folder(path: Path) -> None:
    """Raise ValueError unless a path is a folder; in that of the logs there are only files."""
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise ValueError(f"it is {KINDS.get(stat.S_IFMT(mode), 'a file')}, not a folder")
    if path.name == LOGS:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
                    raise ValueError(f"{entry.name} in it is not a file")


def _check_summary(path: Path) -> None:
    summary = load_json(path)
    for key in FIGURE_KEYS & summary.keys():
        _expect(summary, key, "a number", lambda value: isinstance(value, float) or number(value) is not None)
    _expect(summary, "steps", "a whole number", is_count)
    _expect(summary, "earlier_layouts", "a list of layouts", _are_layouts)


def _are_layouts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(steps := each.get("steps"), list)
        and len(steps) == 2
        and all(map(is_count, steps))
        and isinstance(each.get("settings"), dict | None)
        for each in value
    )


def _check_events(path: Path) -> None:
    """Raise ValueError for a file that holds no row. Not for a damaged line among good ones: a killed run leaves one."""
    with open_regular(path, EVENTS_BYTES) as file:
        first = file.read(LONGEST_ROW // 16)
        *lines, _ = first.split(b"\n")
        if len(lines) < 2:  # a short or a long row
            *lines, _ = (first + file.read(LONGEST_ROW)).split(b"\n")
        if (lines or len(first) == LONGEST_ROW // 16) and not any(parse_rows([line]) for line in lines):
            raise ValueError("it holds no step")


def _expect(found: dict[str, Any], key: str, kind: str, fits: Callable[[Any], bool]) -> None:
    """Raise ValueError where the value of a key is neither null nor what it should be."""
    if (value := found.get(key)) is not None and not fits(value):
        raise ValueError(f"{key}: expected {kind}, got {value!r:.60}")


CHECKS: dict[str, Callable[[Path], object]] = {
    STATUS: lambda path: load_status(path.parent),
    STATUS_LOCK: _check_file,
    CONFIG: _check_file,
    OVERRIDES: _check_file,
    SUMMARY: _check_summary,
    EVENTS: _check_events,
    ENVIRONMENT: load_json,
    LAYOUTS: load_json,
    PLAN: load_json,
    ERROR: lambda path: _expect(load_json(path), "rank", "a rank", is_count),
    TRACKING: lambda path: _expect(load_json(path), "run_id", "letters and digits", lambda v: _matches(RUN_ID, v)),
    SLURM_JOB: lambda path: _expect(load_json(path), "job_id", "the id of a job", lambda v: _matches(JOB_ID, v)),
    SLURM_SETTINGS: load_json,
}
"""File -> what raises ValueError or OSError when it is damaged."""
FOLDER_CHECKS: dict[str, Callable[[Path], object]] = dict.fromkeys((LOGS, TRACES, TENSORBOARD, WANDB), _check_folder)
YAML_CHECKS: dict[str, Callable[[Path], object]] = {
    CONFIG: lambda path: load_config(path.parent),
    OVERRIDES: lambda path: load_overrides(path.parent),
}


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return pattern.fullmatch(str(value) if is_count(value) else value if isinstance(value, str) else "") is not None

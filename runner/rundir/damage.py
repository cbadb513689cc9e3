"""Find the damaged files of a run directory, and read the other files."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshrunner.recipes.storage import check_regular
from meshrunner.runner.rundir import files, records
from meshrunner.runner.rundir.run import load_config, load_overrides
from meshrunner.runner.rundir.states import Status
from meshrunner.runner.rundir.summary import Layouts, Summary

EVENTS_BYTES = 512 << 20
"""Maximum size of events.jsonl in bytes, enough for about a million steps. A larger file counts as damaged."""
READERS: dict[str, Callable[[Path], object]] = {
    files.STATUS: Status.load,
    files.SUMMARY: Summary.load,
    files.EVENTS: lambda path: check_regular(path, EVENTS_BYTES),
    files.ENVIRONMENT: records.Environment.load,
    files.LAYOUTS: Layouts.load,
    files.PLAN: records.PlanRecord.load,
    files.ERROR: records.Failure.load,
    files.TRACKING: records.Tracking.load,
    files.SLURM_JOB: records.Submission.load,
    files.SLURM_SETTINGS: records.JsonFile.load,
    files.CONFIG: lambda path: load_config(path.parent),
    files.OVERRIDES: lambda path: load_overrides(path.parent),
}
"""Functions that read the files of a run directory, keyed by file name. They raise ValueError or OSError for a damaged file."""


def inspect(run_dir: Path, readers: Mapping[str, Callable[[Path], object]]) -> tuple[str, dict[type[Any], Any]]:
    """Read the files that are the keys of `readers`. Return a message about the first damaged file ("" if no file is damaged),
    and the content of the other files, keyed by class: {Status: ..., Summary: ...}. A missing file is not damaged."""
    found: dict[type[Any], Any] = {}
    damage = ""
    try:
        present = set(os.listdir(run_dir))  # noqa: PTH208 names are faster than paths for a thousand runs
    except OSError as error:
        return records.unreadable(run_dir.name, error), found
    for name, read in readers.items():
        if name in present:
            try:
                content = read(run_dir / name)
                found[type(content)] = content
            except (OSError, ValueError) as error:
                damage = damage or records.unreadable(name, error)
    return damage, found


def find_damage(run_dir: Path, names: Iterable[str] = READERS) -> str:
    """Return a message about the first damaged file of a run directory, or "" if no file is damaged."""
    return inspect(run_dir, {name: READERS[name] for name in names})[0]

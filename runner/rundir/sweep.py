"""A sweep directory: its runs, listed in sweep.json and runs.txt, each a run directory below it."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from meshrunner.recipes.storage import replace_file
from meshrunner.runner.rundir.files import SWEEP, SWEEP_RUNS, is_run, is_sweep
from meshrunner.runner.rundir.records import JsonFile, Text, unreadable
from meshrunner.runner.rundir.run import key_of

NUMBERED = re.compile(r"(\d+)(?:_|$)")
"""Number of the combination, at the beginning of a run directory's name."""
REPEATED = re.compile(r"(?:_seed-(?P<seed>\d+))?(?:_repeat-(?P<repeat>\d+))?$")
"""Seed and repeat, at the end of the name. They distinguish the runs of one combination."""
IN_TITLE = 4
"""Varying keys that the title of a sweep names."""
OPTION = re.compile(r"(?!(true|false|null)$)[A-Za-z_][\w./-]*")
"""A value that is understood without its key."""


class PlacedRun(JsonFile):
    """A run that a sweep lists."""

    name: Text
    overrides: list[Text] | None = None


class PlacedSweep(JsonFile):
    """The content of `sweep.json`."""

    command: list[Text] = []
    """The command that placed the newest runs."""
    created: Text | None = None
    """Time of the first batch, in ISO format."""
    varies: list[Text] | None = None
    """Keys that differ between the runs of the first batch."""
    jobs: list[PlacedRun] = []
    """The runs in the order of execution. A run that was placed again by other overrides is there twice."""


def run_names(sweep_dir: Path) -> list[str]:
    """Return the names of a sweep's run directories, each once, in the order of sweep.json; sorted if that is damaged."""
    if not is_sweep(sweep_dir):
        return []
    try:
        return list(dict.fromkeys(run.name for run in PlacedSweep.load(sweep_dir / SWEEP).jobs))
    except (OSError, ValueError):
        return sorted(path.name for path in sweep_dir.iterdir() if is_run(path))


def sweep_damage(sweep_dir: Path) -> str:
    """Return a sentence that says why sweep.json cannot be read; "" if it can, or there is no such file."""
    try:
        PlacedSweep.load(sweep_dir / SWEEP)
    except (OSError, ValueError) as error:
        return f"damaged: {unreadable(sweep_dir / SWEEP, error)}"
    return ""


def add_runs(sweep_dir: Path, added: Sequence[tuple[str, list[str]]]) -> None:
    """
    Record placed runs of a sweep: (name of the run directory, its overrides), in order of execution.

    Adaptive sweepers place them in batches; a restarted sweep adds none that are listed.
    """
    before = PlacedSweep.read(sweep_dir / SWEEP)
    runs = [PlacedRun(name=name, overrides=overrides) for name, overrides in added]
    PlacedSweep(
        command=sys.argv,
        created=before.created or datetime.now().astimezone().isoformat(timespec="seconds"),
        varies=before.varies or _varying_keys(added),  # kept from the first batch: titles must not change
        jobs=[*before.jobs, *(run for run in runs if run not in before.jobs)],
    ).write(sweep_dir / SWEEP)
    write_run_list(sweep_dir)


def _varying_keys(added: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Return the keys that differ between runs; for a single combination, those that the sweeper chose."""
    combinations = {tuple(overrides) for _, overrides in added}
    shared = set[str].intersection(*map(set, combinations)) if len(combinations) > 1 else set(sys.argv)
    keys = [key_of(override) for _, overrides in added for override in overrides if override not in shared]
    seeds = {found["seed"] for name, _ in added if (found := REPEATED.search(name))}
    keys += ["seed"] * (len(seeds) > 1)
    return [key for key in dict.fromkeys(keys) if not key.startswith(("tracker", "sweep."))]


def sweep_title(sweep_dir: Path) -> str:
    """Return when a sweep was placed and what varies in it, `2026-01-31 14:05 parallelism x lr`; else its folder's name."""
    found = PlacedSweep.read(sweep_dir / SWEEP)
    if found.created is None or found.varies is None:
        return sweep_dir.name
    names = [key.rpartition(".")[2] for key in found.varies] or [sweep_dir.name]
    more = f" and {len(names) - IN_TITLE} more" if len(names) > IN_TITLE else ""
    return f"{found.created[:16].replace('T', ' ')} {' x '.join(names[:IN_TITLE])}{more}"


def write_run_list(sweep_dir: Path) -> None:
    """Rewrite runs.txt from sweep.json."""
    replace_file(sweep_dir / SWEEP_RUNS, os.fsencode("".join(f"{name}\n" for name in run_names(sweep_dir))))


def run_labels(sweep_dir: Path) -> dict[str, str]:
    """Return a label for each run directory's name, `#3 fsdp2 full repeat=2`: number of the combination and what varies."""
    varying = varying_overrides(sweep_dir)
    runs = Counter(map(tuple, varying.values()))
    return {name: _label(name, own, repeated=runs[tuple(own)] > 1) for name, own in varying.items()}


def varying_overrides(sweep_dir: Path) -> dict[str, list[str]]:
    """Return the overrides of each run directory's name, without those that all runs have; [] if they are not on record."""
    runs = PlacedSweep.read(sweep_dir / SWEEP).jobs
    overrides = {run.name: run.overrides for run in runs if run.overrides is not None}
    shared = set[str].intersection(*map(set, overrides.values())) if overrides else set[str]()
    return {
        name: [override for override in overrides.get(name, []) if override not in shared]
        for name in run_names(sweep_dir)
    }


def _label(name: str, varying: Sequence[str], *, repeated: bool) -> str:
    number = NUMBERED.match(name)
    if number is None:
        return name
    parts = [f"#{int(number[1])}"]
    for override in varying:
        key, _, value = override.lstrip("+~").partition("=")
        parts.append(value if OPTION.fullmatch(value) else f"{key.rpartition('.')[2]}={value}")
    if repeated and (found := REPEATED.search(name)):
        parts += [f"{key}={value}" for key, value in found.groupdict().items() if value is not None]
    return " ".join(parts)

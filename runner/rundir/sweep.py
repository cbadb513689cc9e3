"""A sweep directory: its runs, listed in sweep.json and runs.txt, each a run directory below it."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from meshrunner.recipes.storage.durable import replace_file
from meshrunner.runner.rundir.files import SWEEP, SWEEP_RUNS, is_run, is_sweep, load_json, read_json, write_json
from meshrunner.runner.rundir.run import key_of

NUMBERED = re.compile(r"(\d+)(?:_|$)")
"""The name of a run directory begins with the number of its combination."""
REPEATED = re.compile(r"(?:_seed-(?P<seed>\d+))?(?:_repeat-(?P<repeat>\d+))?$")
"""And ends with what sets apart the runs of one combination."""
IN_TITLE = 4
"""Varying keys that the title of a sweep names."""
OPTION = re.compile(r"(?!(true|false|null)$)[A-Za-z_][\w./-]*")
"""A value that says what it is without its key."""


def run_names(sweep_dir: Path) -> list[str]:
    """
    The names of a sweep's run directories, each once, in the order of sweep.json and runs.txt.

    sweep.json lists a run again that was placed again by other overrides. Where it is damaged, the run directories that lie
    in the folder are the sweep's, by name. [] where there is none.
    """
    if not is_sweep(sweep_dir):
        return []
    try:
        jobs = _jobs(sweep_dir)
    except (OSError, ValueError):
        return sorted(path.name for path in sweep_dir.iterdir() if is_run(path))
    return list(dict.fromkeys(name for job in jobs if (name := _name(job)) is not None))


def sweep_damage(sweep_dir: Path) -> list[str]:
    """What is wrong with a sweep.json, a sentence each; [] where nothing is, or there is none."""
    if not is_sweep(sweep_dir):
        return []
    try:
        jobs = _jobs(sweep_dir)
    except (OSError, ValueError) as error:
        return [f"damaged: {sweep_dir / SWEEP} cannot be read: {getattr(error, 'strerror', None) or error}"]
    wrong = [job.get("name", job) if isinstance(job, dict) else job for job in jobs if _name(job) is None]
    return [f"damaged: {sweep_dir / SWEEP} lists {name!r:.100}, which is no folder in it" for name in wrong]


def _jobs(sweep_dir: Path) -> list[Any]:
    """The jobs that sweep.json lists; raises ValueError and OSError where they cannot be read."""
    jobs = load_json(sweep_dir / SWEEP).get("jobs", [])
    if not isinstance(jobs, list):
        raise ValueError("its jobs are not a list")
    return jobs


def _name(job: Any) -> str | None:
    """The name of a job's run directory; None unless it can only be a folder directly below the sweep's."""
    name = job.get("name") if isinstance(job, dict) else None
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\0", "\n"} & set(name):
        return None
    try:
        return name if len(os.fsencode(name)) <= NAME_BYTES else None
    except UnicodeEncodeError:
        return None


NAME_BYTES = 255
"""Longest name that a file system takes."""


def add_runs(sweep_dir: Path, added: Sequence[tuple[str, list[str]]]) -> None:
    """
    Record placed runs of a sweep. Adaptive sweepers place them batch by batch; those of a restarted sweep are known already.

    Args:
        added: (name of the run directory, its overrides), in order of execution.
    """
    before = read_json(sweep_dir / SWEEP)
    known = before.get("jobs")
    known = known if isinstance(known, list) else []
    jobs = [{"name": name, "overrides": overrides} for name, overrides in added]
    created = before.get("created") or datetime.now().astimezone().isoformat(timespec="seconds")
    varies = before.get("varies") or _varying_keys(added)  # of the first batch: what is named after them keeps its name
    jobs = known + [job for job in jobs if job not in known]
    write_json(sweep_dir / SWEEP, {"command": sys.argv, "created": created, "varies": varies, "jobs": jobs})
    write_run_list(sweep_dir)


def _varying_keys(added: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The keys that some runs differ in; of a single combination those that the sweeper chose."""
    combinations = {tuple(overrides) for _, overrides in added}
    shared = set[str].intersection(*map(set, combinations)) if len(combinations) > 1 else set(sys.argv)
    keys = [key_of(override) for _, overrides in added for override in overrides if override not in shared]
    seeds = {found["seed"] for name, _ in added if (found := REPEATED.search(name))}
    keys += ["seed"] * (len(seeds) > 1)
    return [key for key in dict.fromkeys(keys) if not key.startswith(("tracker", "sweep."))]


def sweep_title(sweep_dir: Path) -> str:
    """`2026-01-31 14:05 parallelism x lr`: when a sweep was placed, and what varies in it; else its folder's name."""
    found = read_json(sweep_dir / SWEEP)
    created, varies = found.get("created"), found.get("varies")
    if not isinstance(created, str) or not _is_texts(varies):
        return sweep_dir.name
    names = [key.rpartition(".")[2] for key in varies] or [sweep_dir.name]
    more = f" and {len(names) - IN_TITLE} more" if len(names) > IN_TITLE else ""
    return f"{created[:16].replace('T', ' ')} {' x '.join(names[:IN_TITLE])}{more}"


def write_run_list(sweep_dir: Path) -> None:
    """Rewrite runs.txt from sweep.json."""
    replace_file(sweep_dir / SWEEP_RUNS, os.fsencode("".join(f"{name}\n" for name in run_names(sweep_dir))))


def run_labels(sweep_dir: Path) -> dict[str, str]:
    """Names of run directories -> short ones, `#3 fsdp2 full repeat=2`: the number of the combination and what varies."""
    varying = varying_overrides(sweep_dir)
    runs = Counter(map(tuple, varying.values()))
    return {name: _label(name, own, repeated=runs[tuple(own)] > 1) for name, own in varying.items()}


def varying_overrides(sweep_dir: Path) -> dict[str, list[str]]:
    """Names of run directories -> their overrides, without those that all have; empty of what is not on record."""
    jobs = read_json(sweep_dir / SWEEP).get("jobs")
    overrides = {
        job["name"]: job["overrides"]
        for job in (jobs if isinstance(jobs, list) else [])
        if isinstance(job, dict) and isinstance(job.get("name"), str) and _is_texts(job.get("overrides"))
    }
    shared = set[str].intersection(*map(set, overrides.values())) if overrides else set[str]()
    return {
        name: [override for override in overrides.get(name, []) if override not in shared]
        for name in run_names(sweep_dir)
    }


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _label(name: str, varying: Sequence[str], *, repeated: bool) -> str:
    number = NUMBERED.match(name)
    if number is None:
        return name
    parts = [f"#{int(number[1])}", *map(_value, varying)]
    if repeated and (found := REPEATED.search(name)):
        parts += [f"{key}={value}" for key, value in found.groupdict().items() if value is not None]
    return " ".join(parts)


def _value(override: str) -> str:
    key, _, value = override.lstrip("+~").partition("=")
    return value if OPTION.fullmatch(value) else f"{key.rpartition('.')[2]}={value}"

"""What some runs have in common: the lines under the title of their table."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from meshrunner.runner.compare.keys import first_of
from meshrunner.runner.compare.rows import Comparison
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.rundir.files import SWEEP, is_sweep, read_json

LISTED = 3
"""Values of a fact that are named where runs differ in it."""


def _model(run: Run) -> str | None:
    section = run.config.get("model")
    kind = section.get("kind") if isinstance(section, dict) else None
    return run.choices.get("model") or (str(kind) if kind else None)


def _devices(run: Run) -> str | None:
    device, count = run.summary.get("device"), run.summary.get("world_size")
    return f"{count} x {device}" if device and count else None


def _sequence(run: Run) -> str | None:
    length, batch = run.config.get("seq_len"), run.config.get("micro_batch")
    return f"{length} tokens, {batch} a device" if length and batch else None


def _precision(run: Run) -> str | None:
    return run.precision if "precision" in run.config and run.precision != "auto" else None


def _versions(run: Run) -> str | None:
    packages, commit = run.environment.get("packages"), run.environment.get("git_commit")
    known = packages if isinstance(packages, dict) else {}
    named = [f"{name} {known[name]}" for name in ("torch", "meshrunner") if known.get(name)]
    return ", ".join([*named, *([f"commit {str(commit)[:8]}"] if commit else [])]) or None


def _command(run: Run) -> str | None:
    """The sweep's where it is a run of one: what executed it may have been a job's `resume`."""
    command = _of_sweep(run.path.parent) or run.environment.get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) and command else None


@cache  # thousands of runs may lie in it
def _of_sweep(folder: Path) -> list[str] | None:
    found = None
    with suppress(OSError):
        found = read_json(folder / SWEEP).get("command") if is_sweep(folder) else None
    return found if isinstance(found, list) else None


FACTS: dict[str, Callable[[Run], str | None]] = {
    "model": _model,
    "devices": _devices,
    "precision": _precision,
    "sequences": _sequence,
    "versions": _versions,
    "command": _command,
}


def facts(comparison: Comparison) -> dict[str, str]:
    """Title -> value, of the facts that are known; several values where the runs differ."""
    runs = [run for row in comparison.rows for run in row.runs]
    found = {title: list(dict.fromkeys(value for run in runs if (value := of(run)))) for title, of in FACTS.items()}
    return {title: first_of(values, LISTED, "; ") for title, values in found.items() if values}

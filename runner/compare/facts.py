"""Facts that runs share: the lines under the title of their table."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

from meshrunner.runner.compare.keys import first_of
from meshrunner.runner.compare.rows import Comparison
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.rundir import PlacedSweep
from meshrunner.runner.rundir.files import SWEEP

LISTED = 3
"""Values of a fact that are named if runs differ in it."""


def _model(run: Run) -> str | None:
    section = run.config.get("model")
    kind = section.get("kind") if isinstance(section, dict) else None
    return run.choices.get("model") or (str(kind) if kind else None)


def _devices(run: Run) -> str | None:
    device, count = run.summary.device, run.summary.world_size
    return f"{count} x {device}" if device and count else None


def _sequence(run: Run) -> str | None:
    length, batch = run.config.get("seq_len"), run.config.get("micro_batch")
    return f"{length} tokens, {batch} a device" if length and batch else None


def _precision(run: Run) -> str | None:
    return run.precision if "precision" in run.config and run.precision != "auto" else None


def _versions(run: Run) -> str | None:
    packages, commit = run.environment.packages, run.environment.git_commit
    named = [f"{name} {version}" for name in ("torch", "meshrunner") if (version := packages.get(name))]
    return ", ".join([*named, *([f"commit {commit[:8]}"] if commit else [])]) or None


def _command(run: Run) -> str | None:
    """Return the command of a run's sweep, else its own, which may be the `resume` of a job."""
    return shlex.join(_sweep_command(run.path.parent) or run.environment.command) or None


@cache  # once for all runs in the folder
def _sweep_command(folder: Path) -> list[str]:
    return PlacedSweep.peek(folder / SWEEP).command


FACTS: dict[str, Callable[[Run], str | None]] = {
    "model": _model,
    "devices": _devices,
    "precision": _precision,
    "sequences": _sequence,
    "versions": _versions,
    "command": _command,
}


def facts(comparison: Comparison) -> dict[str, str]:
    """Return the known facts by title; several values where the runs differ."""
    runs = [run for row in comparison.rows for run in row.runs]
    found = {title: list(dict.fromkeys(value for run in runs if (value := of(run)))) for title, of in FACTS.items()}
    return {title: first_of(values, LISTED, "; ") for title, values in found.items() if values}

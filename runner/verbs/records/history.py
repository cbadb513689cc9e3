"""`meshrunner compare --history`: the speed of each configuration over commits or dates."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.cells import UNTESTED
from meshrunner.runner.compare.keys import Keys, row_name
from meshrunner.runner.compare.noise import Noise, noise_of
from meshrunner.runner.compare.runs import Row, Run, read_runs
from meshrunner.runner.compare.table import print_columns
from meshrunner.runner.compare.text_table import Column
from meshrunner.runner.figures import speed_figure
from meshrunner.runner.rundir import Status
from meshrunner.runner.verbs.records.ls import below, local_time


def history(folders: Iterable[Path]) -> int:
    """Print a line for each configuration and commit, oldest first. Runs outside a repository are grouped by date. Raise
    ConfigError if no run has completed."""
    found = [run for run in read_runs(below(folders)) if run.state == "completed"]
    if not found:
        raise ConfigError("compare --history: no run has completed below these directories")
    found.sort(key=lambda run: run.record(Status).started or 0.0)
    keys = Keys(found)
    rows: list[list[Row]] = []
    for same in _grouped(found, [keys.configuration(run) for run in found]):
        rows.append([Row(keys.of(each[0]), each) for each in _grouped(same, [_version(run) for run in same])])
    pairs = [(row.key, before.key) for each in rows for before, row in pairwise(each)]
    every = list(chain.from_iterable(rows))
    speed = speed_figure([run.figures for run in found])
    noise = noise_of(speed, every, pairs)
    changes = {pair[0]: _change(noise, *pair) for pair in pairs}
    columns = [
        Column("configuration", [row_name(row.values, keys.settings) for row in every]),
        Column("began", [_began(row.runs[0]) for row in every]),
        Column("commit", [(row.runs[0].environment.git_commit or "")[:8] for row in every]),
        Column("torch", [row.runs[0].environment.packages.get("torch") or "" for row in every]),
        Column("runs", [str(len(row.runs)) for row in every]),
        Column(speed.heading, [speed.cell(row.summaries) for row in every]),
        Column("change since the line above", [changes.get(row.key, "") for row in every]),
    ]
    print_columns([column for column in columns if any(column.cells)], 3)
    return 0


def _grouped(runs: Iterable[Run], keys: Iterable[str]) -> list[list[Run]]:
    """Return lists of the runs with equal keys, in order of appearance."""
    found: dict[str, list[Run]] = {}
    for run, key in zip(runs, keys, strict=True):
        found.setdefault(key, []).append(run)
    return list(found.values())


def _began(run: Run) -> str:
    return f"{local_time(run.record(Status).started or 0.0):%Y-%m-%d %H:%M}"


def _version(run: Run) -> str:
    """Return the text by which runs are grouped into lines: the commit, or the date if it is unknown, and torch's version."""
    commit = run.environment.git_commit or _began(run).partition(" ")[0]
    return f"{commit} {run.environment.packages.get('torch')}"


def _change(noise: Noise, row: Path, before: Path) -> str:
    """Return the confidence interval of the change in speed, marked with `~` if it contains 0."""
    interval = noise.interval(row, before)
    if interval is None:
        return UNTESTED
    low, high = interval
    return f"{low:+.1f}% to {high:+.1f}%{' ~' * (low < 0 < high)}"

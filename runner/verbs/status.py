"""`meshrunner status`: how far every run of a sweep is, also while it is running, from another shell."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.cells import Column
from meshrunner.runner.compare.runs import Run, glance, read_runs
from meshrunner.runner.compare.table import lines_of
from meshrunner.runner.console import console, one_line, say, warn
from meshrunner.runner.figures import UNKNOWN
from meshrunner.runner.launch.progress import PROGRESS, RECENT, SPEED, progress_cells
from meshrunner.runner.rundir.events import StepRow, last_rows
from meshrunner.runner.rundir.files import SLURM_JOB
from meshrunner.runner.rundir.states import is_count


def status(arguments: list[str]) -> int:
    """Print a row for every run of the directories; returns the exit status, raises ConfigError where there is none."""
    if not arguments or any(argument.startswith("-") for argument in arguments):
        raise ConfigError("usage: meshrunner status DIR [DIR...]")
    runs = read_runs([Path(argument) for argument in arguments], glance)
    views = _slurm_views(runs)
    state, step, _, *rest = PROGRESS
    titles = ["run", state, step, SPEED.heading, *rest, *(["SLURM"] if views else []), "reason"]
    rows = []
    for run in runs:
        seen = [views.get(run.path, UNKNOWN)] if views else []
        rows.append([run.path.name, run.state, *_progress(run), *seen, run.reason])
    _print_table(titles, rows)
    counts = Counter(run.state for run in runs)
    say(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 0


def _print_table(titles: list[str], rows: list[list[str]]) -> None:
    """Folded to the width of a terminal; whole, and much faster, where it is piped."""
    screen = console()
    if not screen.is_terminal:
        say("\n".join(lines_of([Column(title, list(cells)) for title, *cells in zip(titles, *rows, strict=True)])))
        return
    table = Table(box=box.MARKDOWN)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    screen.print(table)


def _progress(run: Run) -> list[str]:
    """Steps done, median WPS as `compare` has it, memory and time left. Of a run that has ended the summary says all."""
    if run.state in ("damaged", "missing"):
        return [UNKNOWN] * (len(PROGRESS) - 1)
    done = run.summary.get("steps")
    rows: list[StepRow] = [run.summary | {"step": done}] if is_count(done) and done else []
    if run.state in ("running", "stale") or not rows:
        rows = last_rows(run.path, RECENT)
    step, _, *rest = progress_cells(run.state, run.config.get("steps"), rows)
    return [step, SPEED.cell([run.summary]) or UNKNOWN, *rest]


def _slurm_views(runs: Sequence[Run]) -> dict[Path, str]:
    """What SLURM says of the runs that were submitted to it; {} where none was."""
    submitted = [run.path for run in runs if os.path.lexists(run.path / SLURM_JOB)]
    if not submitted:
        return {}
    from meshrunner.runner.slurm.client import jobs
    from meshrunner.runner.slurm.submit import job_id

    numbers = {path: number for path in submitted if (number := job_id(path))}
    if not numbers:
        return {}
    try:
        known = jobs(numbers.values())
    except ConfigError as error:
        warn(str(error))
        known = {}
    return {path: f"{number}: {known.get(number, 'forgotten')}" for path, number in numbers.items()}

"""`meshrunner status`: how far every run of a sweep is, also while it is running, from another shell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.runs import Run, glance, read_runs
from meshrunner.runner.console import console, one_line, say, warn
from meshrunner.runner.figures import UNKNOWN
from meshrunner.runner.launch.progress import PROGRESS, RECENT, SPEED, progress_cells
from meshrunner.runner.rundir.events import StepRow, last_rows
from meshrunner.runner.rundir.states import is_count


def status(arguments: list[str]) -> int:
    """Print a row for every run of the directories; returns the exit status, raises ConfigError where there is none."""
    if not arguments or any(argument.startswith("-") for argument in arguments):
        raise ConfigError("usage: meshrunner status DIR [DIR...]")
    runs = read_runs([Path(argument) for argument in arguments], glance)
    views = _slurm_views(runs)
    table = Table(box=box.MARKDOWN)
    state, step, _, *rest = PROGRESS
    for title in ("run", state, step, SPEED.heading, *rest, *(["SLURM"] if views else []), "reason"):
        table.add_column(title, overflow="fold")
    for run in runs:
        seen = [views.get(run.path, UNKNOWN)] if views else []
        table.add_row(*map(one_line, [run.path.name, run.state, *_progress(run), *seen, run.reason]))
    console().print(table)
    counts = Counter(run.state for run in runs)
    say(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 0


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
    from meshrunner.runner.slurm.client import jobs
    from meshrunner.runner.slurm.submit import job_id

    numbers = {run.path: number for run in runs if (number := job_id(run.path))}
    if not numbers:
        return {}
    try:
        known = jobs(numbers.values())
    except ConfigError as error:
        warn(str(error))
        known = {}
    return {path: f"{number}: {known.get(number, 'forgotten')}" for path, number in numbers.items()}

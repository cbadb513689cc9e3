"""`meshrunner status`: how far every run of a sweep is, also while it is running, from another shell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.runs import Run, read_runs
from meshrunner.runner.console import console, warn
from meshrunner.runner.figures import UNKNOWN
from meshrunner.runner.launch.progress import PROGRESS, progress_cells


def status(arguments: list[str]) -> int:
    """Print a row for every run of the directories; returns the exit status, raises ConfigError where there is none."""
    if not arguments or any(argument.startswith("-") for argument in arguments):
        raise ConfigError("usage: meshrunner status DIR [DIR...]")
    runs = read_runs(Path(argument) for argument in arguments)
    views = _slurm_views(runs)
    table = Table(box=box.MARKDOWN)
    for title in ("run", *PROGRESS, *(["SLURM"] if views else []), "reason"):
        table.add_column(title, overflow="fold")
    for run in runs:
        cells = progress_cells(run.state, run.config.get("steps"), run.events)
        seen = [views.get(run.path, UNKNOWN)] if views else []
        table.add_row(run.path.name, run.state, *cells, *seen, run.reason)
    screen = console()
    screen.print(table)
    counts = Counter(run.state for run in runs)
    screen.print(", ".join(f"{count} {state}" for state, count in counts.items()), markup=False)
    return 0


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

"""`meshrunner status`: how far every run of a sweep is, also while it is running, from another shell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich import box
from rich.table import Table

from recipes.option import ConfigError
from runner.compare.runs import Run, read_runs
from runner.events import Row
from runner.progress import duration, memory_text, warn
from runner.screen import console
from runner.table import UNKNOWN

PROGRESS = ("state", "step", "WPS per device", "memory", "left")
"""Columns of a run that may be going on."""
RECENT = 20
"""Last steps that the time left is judged by."""


def status(arguments: list[str]) -> None:
    """Print a row for every run of the directories; raises ConfigError where there is none."""
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


def _slurm_views(runs: Sequence[Run]) -> dict[Path, str]:
    """What SLURM says of the runs that were submitted to it; {} where none was."""
    from runner.slurm.queue import jobs
    from runner.slurm.submit import job_id

    numbers = {run.path: number for run in runs if (number := job_id(run.path))}
    if not numbers:
        return {}
    try:
        known = jobs(numbers.values())
    except ConfigError as error:
        warn(str(error))
        known = {}
    return {path: f"{number}: {known.get(number, 'forgotten')}" for path, number in numbers.items()}


def progress_cells(state: str, steps: object, rows: Sequence[Row]) -> tuple[str, str, str, str]:
    """
    The cells of PROGRESS after the state: what the newest step was like.

    Args:
        steps: as configured; anything but a number where that cannot be known.
        rows: the newest steps, RECENT of them or more.
    """
    if not rows:
        return f"0/{steps}" if steps else UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN
    last = rows[-1]
    times = [row["perf/step_time_s"] for row in rows[-RECENT:] if row.get("perf/step_time_s")]
    left = UNKNOWN
    if state == "running" and isinstance(steps, int) and times:
        left = duration(median(times) * (steps - last["step"]))
    wps = last.get("perf/wps")
    return f"{last['step']}/{steps}", UNKNOWN if wps is None else f"{wps:,.0f}", memory_text(last), left

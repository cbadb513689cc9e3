"""`meshrunner status`: show the progress of all runs of a sweep, even while another shell executes the sweep."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.compare.keys import first_of
from meshrunner.runner.compare.runs import Run, glance, read_runs
from meshrunner.runner.compare.text_table import Column, lines_of
from meshrunner.runner.console import console, on_terminal, one_line, say, warn
from meshrunner.runner.figures import UNKNOWN
from meshrunner.runner.launch.progress import PROGRESS, RECENT, SPEED, progress_cells, run_table
from meshrunner.runner.rundir import StepRow, last_rows, run_labels
from meshrunner.runner.slurm.client import job_id, jobs


def status(arguments: list[str]) -> int:
    """Print a row for each run in the given directories. Raise ConfigError if a directory has no runs."""
    runs = read_runs(parse("status", arguments).directories, glance)
    views = _slurm_views(runs)
    if on_terminal():
        _print_for_terminal(runs, views)
    else:
        _print_piped(runs, views)
    counts = Counter(run.state for run in runs)
    say(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 0


def _print_piped(runs: Sequence[Run], views: dict[Path, str]) -> None:
    state, step, _, *rest = PROGRESS
    titles = ["run", state, step, SPEED.heading, *rest, *(["SLURM"] if views else []), "reason"]
    rows = []
    for run in runs:
        seen = [views.get(run.path, UNKNOWN)] if views else []
        rows.append([run.path.name, *_cells(run, SPEED.cell([run.figures]) or UNKNOWN), *seen, run.reason])
    say("\n".join(lines_of([Column(title, list(cells)) for title, *cells in zip(titles, *rows, strict=True)])))


def _print_for_terminal(runs: Sequence[Run], views: dict[Path, str]) -> None:
    """Print a table with a row per run. Below, print each reason and SLURM state once, with the runs that share it."""
    screen, folders = console(), {run.path.parent for run in runs}
    labels = run_labels(runs[0].path.parent) if len(folders) == 1 else {}  # label runs by the settings that vary
    rows = []
    alike: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        name = labels.get(run.path.name, run.path.name)
        rows.append([name, *_cells(run, SPEED.text(SPEED.values([run.figures])[0]))])
        if run.reason:
            alike.setdefault((run.state, run.reason), []).append(name)
        if view := views.get(run.path):
            number, _, job = view.partition(": ")
            alike.setdefault(("SLURM", job), []).append(f"{name} (job {number})")
    state, step, _, *rest = PROGRESS
    screen.print(run_table(["run", state, step, "median WPS", *rest], rows, screen.width))
    for (kind, reason), names in alike.items():
        screen.print(one_line(f"{kind}: {first_of(names)}: {reason}"), soft_wrap=False)


def _cells(run: Run, speed: str) -> list[str]:
    """Return a run's state, completed steps, `speed`, memory and time left. Read the event log of a run that has not ended."""
    if run.state in ("damaged", "missing"):  # its files cannot be read, so its figures are unknown
        return [run.state] + [UNKNOWN] * (len(PROGRESS) - 1)
    done = run.summary.steps
    rows = [StepRow(run.figures | {"step": done})] if done else []
    if run.state in ("running", "stale") or not rows:
        rows = last_rows(run.path, RECENT)
    step, _, *rest = progress_cells(run.state, run.config.get("steps"), rows)
    return [run.state, step, speed, *rest]


def _slurm_views(runs: Sequence[Run]) -> dict[Path, str]:
    """Return a text `JOB_ID: STATE` for each submitted run, keyed by run directory."""
    numbers = {run.path: number for run in runs if (number := job_id(run.path))}
    try:
        known = jobs(numbers.values())
    except ConfigError as error:
        warn(str(error))
        known = {}
    return {path: f"{number}: {known.get(number, 'unknown')}" for path, number in numbers.items()}

"""`sweep.repeat=auto`: after the first rounds, repeat only the combinations whose order is not decided."""

from __future__ import annotations

import random
from pathlib import Path

from meshrunner.runner.compare.comparison import compare_sweep
from meshrunner.runner.compare.findings import undecided
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.resumable import first_experiment
from meshrunner.runner.console import say
from meshrunner.runner.rundir import PlacedSweep, add_runs, place_again, repeat_of, run_names
from meshrunner.runner.rundir.files import SWEEP
from meshrunner.runner.sweep.execute_all import execute_all

FIRST = "_repeat-1"
"""End of the name of a run in the first round."""


def execute_further_rounds(sweep_dir: Path) -> int:
    """Execute rounds until all verdicts are decided or `sweep.max_repeat` is reached. Return the exit status of their runs."""
    first, status = first_experiment(sweep_dir, run_names(sweep_dir)), 0
    while first.sweep.repeat == "auto" and (run_dirs := _place_round(sweep_dir, first)):
        code, stop = execute_all(run_dirs, first)
        status = max(status, code)
        if stop:
            break
    return status


def _place_round(sweep_dir: Path, first: Experiment) -> list[Path]:
    """Write the runs of the next round, in shuffled order, and return them. Return [] if no further round is needed."""
    comparison, _ = compare_sweep(sweep_dir)
    number = 1 + max(int(repeat_of(run.path.name).rpartition("-")[2] or 0) for run in comparison.runs)
    rows = [row for row in undecided(comparison) if len(row.completed) == len(row.runs)]
    if len(rows) < 2 or number > first.sweep.max_repeat:
        return []
    say(f"round {number}: {len(rows)} of {len(comparison.rows)} combinations, whose order is not decided, run again")
    first_round = [run.path for row in rows for run in row.runs if run.path.name.endswith(FIRST)]
    random.Random(first.seed + number).shuffle(first_round)
    overrides = {run.name: run.overrides or [] for run in PlacedSweep.read(sweep_dir / SWEEP).jobs}
    placed = []
    for run_dir in first_round:
        again = run_dir.with_name(f"{run_dir.name.removesuffix(FIRST)}_repeat-{number}")
        place_again(run_dir, again)
        placed.append(again)
    add_runs(
        sweep_dir, [(again.name, overrides.get(run.name, [])) for run, again in zip(first_round, placed, strict=True)]
    )
    return placed

"""`sweep.repeat=auto`: after the first rounds, repeat only the combinations whose order by speed is undecided."""

import random
from pathlib import Path

from meshrunner.runner.compare.comparison import compare_sweep
from meshrunner.runner.compare.findings import undecided
from meshrunner.runner.compare.noise import REPEATS
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.resumable import first_experiment
from meshrunner.runner.console import say
from meshrunner.runner.rundir import PlacedSweep, add_runs, in_round, place_again, repeat_number, sweep_damage
from meshrunner.runner.rundir.files import SWEEP
from meshrunner.runner.sweep.execute_all import execute_all

UNFINISHED = ("pending", "stale", "interrupted", "preempted")
"""States of runs that the current round must still execute."""


def execute_further_rounds(sweep_dir: Path) -> int:
    """Execute rounds until the order by speed is decided or `sweep.max_repeat` is reached. Return the highest exit status."""
    first, status = first_experiment(sweep_dir), 0
    before: list[Path] = []
    while first.sweep.repeat == "auto" and (run_dirs := _place_round(sweep_dir, first)) not in ([], before):
        code, stop = execute_all(run_dirs, first)
        status, before = max(status, code), run_dirs
        if stop:
            break
    return status


def _place_round(sweep_dir: Path, first: Experiment) -> list[Path]:
    """Return the unfinished runs of the last round. If all its runs are finished, write and return the runs of the next round.
    Return [] if no further round is needed."""
    if sweep_damage(sweep_dir):
        return []
    comparison, _ = compare_sweep(sweep_dir)
    rounds = {run.path: repeat_number(run.path.name) for run in comparison.runs}
    last = max(rounds.values())
    # If an earlier command was killed, its last round may be only partly written or executed.
    left = [run.path for run in comparison.runs if rounds[run.path] == last > REPEATS and run.state in UNFINISHED]
    if left:
        _list(sweep_dir, left)
        return left
    rows = undecided(comparison)
    if len(rows) < 2 or last >= first.sweep.max_repeat:
        return []
    say(f"round {last + 1}: repeating the {len(rows)} of {len(comparison.rows)} combinations whose order is undecided")
    first_round = [run.path for row in rows for run in row.runs if rounds[run.path] == 1]
    random.Random(first.seed + last).shuffle(first_round)
    placed = []
    for run_dir in first_round:
        placed.append(run_dir.with_name(in_round(run_dir.name, last + 1)))
        place_again(run_dir, placed[-1])
    _list(sweep_dir, placed)
    return placed


def _list(sweep_dir: Path, run_dirs: list[Path]) -> None:
    """Add runs to sweep.json. Each run gets the same overrides as the run that it repeats."""
    overrides = {run.name: run.overrides or [] for run in PlacedSweep.read(sweep_dir / SWEEP).jobs}
    names = [run_dir.name for run_dir in run_dirs]
    add_runs(sweep_dir, [(name, overrides.get(in_round(name, 1), [])) for name in names])

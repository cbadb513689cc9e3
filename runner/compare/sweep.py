"""The comparison that a sweep ends with."""

from __future__ import annotations

from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.rows import Comparison, compare_runs
from meshrunner.runner.compare.runs import read_runs


def compare_sweep(sweep_dir: Path) -> tuple[Comparison, str | None]:
    """
    The runs of a sweep, compared with those of its `sweep.baseline`; without it, where it is none of theirs.

    Returns:
        The comparison, and why it is not with the baseline.

    Raises:
        ConfigError: there is no run.
    """
    runs = read_runs([sweep_dir])
    baseline = next((run.config.get("sweep", {}).get("baseline") for run in runs if run.config), None)
    try:
        return compare_runs(runs, baseline), None
    except ConfigError as error:  # a baseline that does not vary here
        return compare_runs(runs), str(error)

"""A sweep directory: its runs, listed in sweep.json and runs.txt, each a run directory below it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from meshrunner.runner.rundir.files import SWEEP, SWEEP_RUNS, read_json, write_json


def run_names(sweep_dir: Path) -> list[str]:
    """
    The names of a sweep's run directories, each once, in the order of sweep.json and runs.txt.

    sweep.json lists a run again that was placed again by other overrides. [] where there is none, or it is damaged.
    """
    jobs = read_json(sweep_dir / SWEEP).get("jobs")
    names = [job.get("name") for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def add_runs(sweep_dir: Path, added: Sequence[tuple[str, list[str]]]) -> None:
    """
    Record placed runs of a sweep. Adaptive sweepers place them batch by batch; those of a restarted sweep are known already.

    Args:
        added: (name of the run directory, its overrides), in order of execution.
    """
    known = read_json(sweep_dir / SWEEP).get("jobs", [])
    jobs = [{"name": name, "overrides": overrides} for name, overrides in added]
    write_json(sweep_dir / SWEEP, {"command": sys.argv, "jobs": known + [job for job in jobs if job not in known]})
    write_run_list(sweep_dir)


def write_run_list(sweep_dir: Path) -> None:
    """Rewrite runs.txt from sweep.json."""
    (sweep_dir / SWEEP_RUNS).write_text("".join(f"{name}\n" for name in run_names(sweep_dir)))

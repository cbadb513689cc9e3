"""`meshrunner cancel`: stop what runs or waits, here and in SLURM's queue."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.rundir.files import SLURM_JOB
from meshrunner.runner.rundir.owner import owner_is_alive
from meshrunner.runner.rundir.run import read_config
from meshrunner.runner.rundir.states import read_state, read_status, update_status
from meshrunner.runner.rundir.sweep import run_names
from meshrunner.runner.slurm.client import jobs, slurm
from meshrunner.runner.slurm.submit import job_id


def cancel(arguments: list[str]) -> int:
    """
    Stop the runs of a run or sweep directory that run or wait; returns the exit status.

    What waited stays `pending`, what ran is `interrupted`.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("usage: meshrunner cancel DIR")
    folder = Path(arguments[0]).absolute()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    names = run_names(folder)
    run_dirs = [folder / name for name in names] if names else [folder]
    if not names:
        read_config(folder)
    numbers = {run_dir: number for run_dir in run_dirs if (number := job_id(run_dir))}
    here = [run_dir for run_dir in run_dirs if _runs_here(run_dir)]
    for run_dir in here:
        os.kill(int(read_status(run_dir)["owner"]["pid"]), signal.SIGINT)
    known = jobs(numbers.values())
    active = {run_dir: number for run_dir, number in numbers.items() if number in known and known[number].active}
    if active:
        slurm("scancel", *sorted(active.values()))
        for run_dir, number in active.items():
            (run_dir / SLURM_JOB).unlink(missing_ok=True)
            if known[number].state == "PENDING" and read_state(run_dir) == "running":
                update_status(run_dir, state="interrupted", reason="cancelled before SLURM started it again")
    print(f"cancelled {_count(len(active), 'SLURM job')} and {_count(len(here), 'run')} on this machine")
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _runs_here(run_dir: Path) -> bool:
    """Whether a process on this machine, and not in a SLURM job, executes the run."""
    status = read_status(run_dir)
    owner = status.get("owner") or {}
    return owner_is_alive(status) and not owner.get("slurm_job_id") and owner.get("host") == socket.gethostname()

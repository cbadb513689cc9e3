"""`meshrunner cancel`: interrupt runs on this machine, and cancel running and queued SLURM jobs."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import existing, parse
from meshrunner.runner.compare.runs import glance
from meshrunner.runner.console import counted, one_line, warn
from meshrunner.runner.rundir import find_damage, owner_is_alive, read_status, run_names, sweep_damage, update_status
from meshrunner.runner.rundir.files import CONFIG, SLURM_JOB, STATUS, is_run, is_sweep
from meshrunner.runner.slurm.client import job_id, jobs, slurm


def cancel(arguments: list[str]) -> int:
    """Stop a run or all runs of a sweep. Return 1 if a run directory is missing or any file is damaged, else 0."""
    folder = existing(parse("cancel", arguments).directory)
    if not is_run(folder) and not is_sweep(folder):
        raise ConfigError(f"{folder} is not a run directory: it has no {CONFIG}")
    if problem := sweep_damage(folder):
        warn(one_line(problem))
    run_dirs = [folder / name for name in run_names(folder)] if is_sweep(folder) else [folder]
    for run_dir in run_dirs:
        run = glance(run_dir)
        if run.state in ("damaged", "missing"):
            warn(one_line(f"{run.state}: {run_dir}: {run.reason}"))
        problem = problem or find_damage(run_dir, (STATUS, SLURM_JOB))
    present = [run_dir for run_dir in run_dirs if run_dir.is_dir()]  # even a damaged run may be running
    interrupted, stopped = sum(map(_interrupt, present)), _stop_jobs(present)
    print(f"cancelled {counted(stopped, 'SLURM job')} and {counted(interrupted, 'run')} on this machine")
    return int(bool(problem))


def _interrupt(run_dir: Path) -> bool:
    """Interrupt the process that executes a run on this machine without SLURM. Return False if no such process was running."""
    status = read_status(run_dir)
    owner = status.owner
    if owner is None or not owner.pid or owner.slurm_job_id or owner.host != socket.gethostname():
        return False
    if alive := owner_is_alive(status):
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGINT)
    return alive


def _stop_jobs(run_dirs: Sequence[Path]) -> int:
    """Cancel the running and queued SLURM jobs of the runs. Return the number of cancelled jobs."""
    numbers = {run_dir: number for run_dir in run_dirs if (number := job_id(run_dir))}
    known = jobs(numbers.values())
    active = {run_dir: number for run_dir, number in numbers.items() if number in known and known[number].active}
    if active:
        slurm("scancel", *sorted(active.values()))
    for run_dir, number in active.items():
        (run_dir / SLURM_JOB).unlink(missing_ok=True)
        if known[number].state == "PENDING" and read_status(run_dir).state == "running":
            update_status(run_dir, state="interrupted", reason="cancelled before SLURM restarted the job")
    return len(active)

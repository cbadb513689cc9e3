"""`meshrunner cancel`: stop running and waiting runs, here and in SLURM's queue."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import existing, parse
from meshrunner.runner.compare.runs import glance
from meshrunner.runner.console import one_line, warn
from meshrunner.runner.rundir import (
    find_damage,
    owner_is_alive,
    read_state,
    read_status,
    run_names,
    sweep_damage,
    update_status,
)
from meshrunner.runner.rundir.files import CONFIG, SLURM_JOB, STATUS, is_run, is_sweep
from meshrunner.runner.slurm.client import jobs, slurm
from meshrunner.runner.slurm.submit import job_id


def cancel(arguments: list[str]) -> int:
    """
    Stop the running and waiting runs of a run or sweep directory; returns the exit status.

    Waiting runs stay `pending`, running ones become `interrupted`.
    """
    folder = existing(parse("cancel", arguments).directory)
    if not is_run(folder) and not is_sweep(folder):
        raise ConfigError(f"{folder} is not a run directory: it has no {CONFIG}")
    problems = [damage] if (damage := sweep_damage(folder)) else []
    remarks: list[str] = []
    here: list[Path] = []
    submitted: list[Path] = []
    for run_dir in [folder / name for name in run_names(folder)] if is_sweep(folder) else [folder]:
        run = glance(run_dir)
        if run.state in ("damaged", "missing"):
            remarks.append(f"{run.state}: {run_dir}: {run.reason}")
        if run_dir != folder and run_dir.is_symlink():
            continue
        # Even if other files are damaged, the run may still be running.
        for name, found in ((STATUS, here), (SLURM_JOB, submitted)):
            if why := find_damage(run_dir, [name]):
                problems.append(f"damaged: {run_dir}: {why}")
            else:
                found.append(run_dir)
    for problem in dict.fromkeys([*problems, *remarks]):
        warn(one_line(problem))
    if not here and not submitted:
        raise ConfigError(f"{folder} has no run that can be cancelled")
    interrupted = sum(map(_interrupt, here))
    stopped = _stop_jobs(submitted)
    print(f"cancelled {_count(stopped, 'SLURM job')} and {_count(interrupted, 'run')} on this machine")
    return int(bool(problems))


def _interrupt(run_dir: Path) -> bool:
    """Interrupt the process that executes a run on this machine outside SLURM; returns whether there is one."""
    status = read_status(run_dir)
    owner = status.owner
    if owner is None or not owner.pid or owner.slurm_job_id or owner.host != socket.gethostname():
        return False
    if alive := owner_is_alive(status):
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGINT)
    return alive


def _stop_jobs(run_dirs: Sequence[Path]) -> int:
    """Cancel the running and waiting jobs of some runs; returns their number."""
    numbers = {run_dir: number for run_dir in run_dirs if (number := job_id(run_dir))}
    known = jobs(numbers.values())
    active = {run_dir: number for run_dir, number in numbers.items() if number in known and known[number].active}
    if active:
        slurm("scancel", *sorted(active.values()))
    for run_dir, number in active.items():
        (run_dir / SLURM_JOB).unlink(missing_ok=True)
        pending = known[number].state == "PENDING" and not find_damage(run_dir, [STATUS])
        if pending and read_state(run_dir) == "running":
            update_status(run_dir, state="interrupted", reason="cancelled before SLURM started it again")
    return len(active)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

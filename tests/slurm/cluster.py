"""What the tests ask of the cluster, and do to it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.command import TINY, Ended, meshrunner, steps_done

SLOW = ("optimizer.kind=faulty:SlowAdamW", "checkpoint=dcp", "checkpoint.every=1000", "checkpoint.keep=2")
"""A tenth of a second a step; saved when the run is requested to stop, and not before."""
MAIN = ("hydra.launcher.partition=main", "hydra.launcher.time=0:10:00")
LOW = ("hydra.launcher.partition=low", "hydra.launcher.time=0:10:00", "hydra.launcher.notice_s=5")


def root() -> Path:
    """Where the cluster keeps everything."""
    return Path(os.environ.get("SLURM_LAB_ROOT", f"{tempfile.gettempdir()}/slurm-lab"))


def slurm(*command: str) -> str:
    """One of SLURM's commands; its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def until(condition: Callable[[], Any], within: float) -> Any:
    """Poll until a condition holds; returns its value."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within:g} s; the queue:\n{slurm('squeue', '--all')}"
        time.sleep(0.2)
    return value


def ended(within: float = 300) -> None:
    """Wait until no job runs or waits."""
    until(lambda: not slurm("squeue", "--noheader"), within)


def submit(*arguments: str, cwd: Path, code: int = 0, flags: tuple[str, ...] = ()) -> Ended:
    """`meshrunner submit` of tiny runs on nodes of two workers."""
    done = meshrunner("submit", *flags, *TINY, *arguments, cwd=cwd)
    assert done.code == code, done
    return done


def in_a_step(run_dir: Path, step: int = 3) -> None:
    """Wait until a run is in the middle of its steps."""
    until(lambda: steps_done(run_dir) >= step, 60)


def daemons_of_step(job: str) -> list[psutil.Process]:
    """The processes that hold the tasks of a job's srun, one on each node."""
    return [p for p in psutil.process_iter(["cmdline"]) if f"[{job}.0]" in " ".join(p.info["cmdline"] or ())]

"""Run a command and measure the time of all of its processes, including those that outlive their parents."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Cost:
    """Time used by a command and all its descendants."""

    wall_s: float
    cpu_s: float
    """User and system time in seconds."""
    begin: float
    """Unix time at which the command started."""


def measure(command: list[str], cwd: Path, **environment: str) -> Cost:
    """Run a command and return its cost. Raise CalledProcessError with the command's output if the command fails."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children, so their time is included
    before = _children_cpu()
    # Leave out this variable, so that programs start from compiled byte code, as installed programs do.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | environment
    begin, clock = time.time(), time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - clock
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return Cost(wall, _children_cpu() - before, begin)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

"""Stop requests: SLURM, or the user's first Ctrl-C, asks a run to save a checkpoint and end.

A run in a SLURM job watches for three events, because clusters stop jobs differently. First, SLURM sends SIGTERM to all processes
of a job step; workers and the forkserver ignore SIGTERM. Second, SLURM sends SIGUSR1 to the batch shell, as slurm/run.sbatch
requests, and the shell writes a file into the run directory. Third, the run's parent process (SLURM's step daemon) is killed.
"""

import os
import signal
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.console import warn
from meshrunner.runner.process.signals import STOP_REQUESTS, blocked, in_slurm_job, job_start_id
from meshrunner.runner.process.worker_context import SharedIntegers
from meshrunner.runner.rundir.files import STOP_REQUEST
from meshrunner.runner.slurm.client import show_job

CHECK_EVERY_S = 0.5
NEAR_LIMIT_S = 240.0
"""A stop request within the last NEAR_LIMIT_S seconds before the job's time limit is attributed to the time limit."""


class Preemption:
    """A context manager that detects stop requests. In a SLURM job, it handles the signals in STOP_REQUESTS."""

    def __init__(self, run_dir: Path, *, saves: bool = False, stopping: str = "saving a checkpoint") -> None:
        """Prepare to watch a run. `saves`: whether the run saves checkpoints. `stopping`: text to print at the first Ctrl-C."""
        self.request = run_dir / STOP_REQUEST
        self.saves = saves
        self.stopping = stopping
        self.in_job = in_slurm_job()
        self.shared = SharedIntegers(1) if saves or self.in_job else None
        """Flag that asks the workers to stop; None if nothing can request a stop."""
        self.reason = ""
        self.interrupted = False
        """Whether the user requested the stop."""
        self._told = False
        self._signal = 0
        self._parent = os.getppid()
        self._checked_at = 0.0
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.shared is not None and bool(self.shared[0])

    def __enter__(self) -> Self:
        if self.in_job:
            self._before = {name: signal.signal(name, self._on_signal) for name in STOP_REQUESTS}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_REQUESTS)
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signal = number

    def interrupt(self) -> bool:
        """Ask workers to save a checkpoint and end. Return False if the run never saves. Signal handlers may call this method."""
        if self.shared is None or not self.saves:
            return False
        self.interrupted = True
        self.shared[0] = 1
        return True

    def poll(self) -> None:
        """Look for a stop request and pass it on to the workers. Raise Interrupted if the SLURM job was cancelled."""
        if self.interrupted and not self._told:
            self._told = True
            warn(f"{self.stopping}; press Ctrl-C again to stop at once")
        now = time.monotonic()
        if not self.in_job or self.shared is None or self.requested:
            return
        if not self._signal and now - self._checked_at <= CHECK_EVERY_S:
            return
        self._checked_at = now
        if os.getppid() != self._parent:
            self.reason = f"the parent process of the run on {socket.gethostname()} was killed"
        elif self._signal or self._shell_requests():
            self.reason = _reason()
        if self.reason:
            self.shared[0] = 1

    def _shell_requests(self) -> bool:
        with suppress(FileNotFoundError):
            return self.request.read_text().strip() == job_start_id()  # ignore requests for earlier starts of the job
        return False


def _reason() -> str:
    """Return the reason why SLURM requests a stop. Raise Interrupted if the job was cancelled."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # In an array, SLURM_JOB_ID is ambiguous, because the id of one task is also the id of the whole array.
    with blocked(STOP_REQUESTS):  # scontrol inherits the mask, so SLURM's second SIGTERM to the job does not kill it
        job = show_job(f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"])
    if job.get("JobState") in ("CANCELLED", "COMPLETING"):  # SLURM will soon kill the processes of the job
        requeued = int(job.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0))
        if not requeued and job.get("Reason") != "TimeLimit":
            raise Interrupted("by scancel")
        return "requeued by SLURM" if requeued else f"the job's time limit ({job.get('TimeLimit')}) is reached"
    if job.get("PreemptTime", "None") != "None":
        return "preempted by SLURM for a job of higher priority"
    with suppress(ValueError):  # raised by the value `Unknown`
        end = datetime.fromisoformat(job.get("EndTime", "Unknown"))
        if (end - datetime.now()).total_seconds() < NEAR_LIMIT_S:
            return f"the job's time limit ({job.get('TimeLimit')}) is near"
    return "SLURM requested a stop"

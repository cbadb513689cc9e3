"""Stop requests by SLURM: the run saves itself, ends with exit status 75, and continues when it is started again.

Clusters differ in what they send and to whom. SIGTERM reaches every process of a job's steps (the workers and their
forkserver ignore it); SIGUSR1, as slurm/run.sbatch has it sent, reaches the batch shell, which marks the run directory. A
run whose parent process was killed, the daemon of SLURM's step, is an orphan: it stops, too.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.process.forkserver import shared_integers
from meshrunner.runner.process.signals import STOP_REQUESTS, in_slurm_job, start_of_job
from meshrunner.runner.rundir.files import STOP_REQUEST
from meshrunner.runner.slurm.client import show

POLL_S = 0.5
NEAR_S = 240.0
"""Seconds before the job's time limit in which a stop request is taken to be because of the limit."""


class Preemption:
    """Whether a run is requested to stop. A context manager: inside, signals of a SLURM job are stop requests."""

    def __init__(self, run_dir: Path) -> None:
        self.mark = run_dir / STOP_REQUEST
        self.start = start_of_job()
        self.shared: Any = shared_integers(1) if in_slurm_job() else None
        """The flag that the workers read, 1 once a stop is requested; None outside SLURM jobs."""
        self.reason = ""
        self._signal = 0
        self._parent = os.getppid()
        self._polled = 0.0
        self._handlers: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.shared is not None and bool(self.shared[0])

    def __enter__(self) -> Preemption:
        if self.shared is not None:
            self._handlers = {name: signal.signal(name, self._on_signal) for name in STOP_REQUESTS}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_REQUESTS)
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._handlers.items():
            signal.signal(name, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signal = number

    def poll(self) -> None:
        """
        Find out whether the run is requested to stop, and tell the workers.

        Raises:
            Interrupted: the job was cancelled. The signals are those of a preemption; only SLURM knows the difference.
        """
        now = time.monotonic()
        if self.shared is None or self.requested or not (self._signal or now - self._polled > POLL_S):
            return
        self._polled = now
        if os.getppid() != self._parent:
            self.reason = f"the parent process of the run on {socket.gethostname()} was killed"
        elif self._signal or self._marked():
            self.reason = _reason()
        if self.reason:
            self.shared[0] = 1

    def _marked(self) -> bool:
        """Whether the batch shell of this start of the job has marked the run."""
        try:
            return self.mark.read_text().strip() == self.start
        except FileNotFoundError:
            return False


def _reason() -> str:
    """Why SLURM requests a stop; raises Interrupted when the job was cancelled."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # The $SLURM_JOB_ID of one of an array's tasks is that of the whole array.
    job = show(f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"])
    if job.get("JobState") in ("CANCELLED", "COMPLETING"):  # soon all its processes are killed
        again = int(job.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0))
        if not again and job.get("Reason") != "TimeLimit":
            raise Interrupted("by scancel")
        return (
            "SLURM ends the job and starts it again"
            if again
            else f"the job's time limit ({job.get('TimeLimit')}) is reached"
        )
    if job.get("PreemptTime", "None") != "None":
        return "preempted by SLURM for a job of higher priority"
    limit, end = job.get("TimeLimit"), job.get("EndTime", "Unknown")
    try:
        near = (datetime.fromisoformat(end) - datetime.now()).total_seconds() < NEAR_S
    except ValueError:
        near = False
    if near:
        return f"the job's time limit ({limit}) is near"
    return "SLURM requested a stop"

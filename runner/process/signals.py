"""The signals that end a command: which interrupt it at once, and which only request that it stops in order.

Ctrl-C, SIGHUP and, outside SLURM jobs, SIGTERM interrupt. In a SLURM job SIGTERM and SIGUSR1 are requests to stop, which
`launch.preemption` hears.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from meshrunner.recipes.errors import Interrupted


def in_slurm_job() -> bool:
    """Whether this process is part of a job that may be requested to stop."""
    return "SLURM_JOB_ID" in os.environ


def start_of_job() -> str:
    """The SLURM job and how often it was requeued before, `12.0`: it names one start of the job."""
    return f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


STOP_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""What requests that a run in a SLURM job stops."""
INTERRUPTS = (signal.SIGINT, signal.SIGHUP, *(() if in_slurm_job() else (signal.SIGTERM,)))
"""What interrupts a run at once."""
IGNORE_S = 15.0
"""Seconds after an interrupt in which no other is heard: the workers are being ended."""


def hold_stop_requests() -> None:
    """Hold back, in a SLURM job, requests to stop until a `Preemption` hears them. By itself one would end the command."""
    if in_slurm_job():
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_REQUESTS)


@contextmanager
def interruptible(consequence: str = "") -> Iterator[None]:
    """
    Inside, INTERRUPTS raise Interrupted; those that follow at once, while the workers end, are ignored.

    Args:
        consequence: of such an end, for the user to read.
    """
    last = float("-inf")

    def interrupt(number: int, _: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > IGNORE_S:
            last = now
            raise Interrupted(f"by {signal.Signals(number).name}{consequence}")

    before = {name: signal.signal(name, interrupt) for name in INTERRUPTS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, INTERRUPTS are held back: what is done there is done as a whole, and they arrive at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

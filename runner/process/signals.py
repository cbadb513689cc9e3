"""Handles the signals that end a command. An interrupt ends a run at once. A stop request ends a run after a checkpoint.

Ctrl-C and SIGHUP are interrupts. If a run saves checkpoints, the first Ctrl-C is a stop request. In a SLURM job,
SIGTERM and SIGUSR1 are stop requests (see `launch.preemption`). Outside SLURM jobs, SIGTERM is an interrupt.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from meshrunner.recipes.errors import Interrupted


def in_slurm_job() -> bool:
    return "SLURM_JOB_ID" in os.environ


def job_start_id() -> str:
    """Return an id for this start of the SLURM job: `12.0` at the first start of job 12, `12.1` after one requeue."""
    return f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


STOP_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run in a SLURM job to save a checkpoint and end."""
INTERRUPTS = (signal.SIGINT, signal.SIGHUP, *(() if in_slurm_job() else (signal.SIGTERM,)))
"""Signals that end a run at once."""
IGNORE_S = 15.0
"""Seconds after an interrupt during which further interrupts are ignored, so that the workers have time to end."""
REPEAT_S = 0.01
"""Seconds until an interrupt is sent again if it was raised in a finalizer (`__del__`), where Python drops exceptions."""


def hold_stop_requests() -> None:
    """Block STOP_REQUESTS in a SLURM job until a `Preemption` handles these signals, which would otherwise kill the command."""
    if in_slurm_job():
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_REQUESTS)


@contextmanager
def interruptible(consequence: str = "") -> Iterator[None]:
    """Raise Interrupted on a signal in INTERRUPTS, and ignore further signals for IGNORE_S seconds. The message names the
    signal and ends with `consequence`, as in "by SIGINT; repeat the command to upload the rest"."""
    last, received = float("-inf"), 0

    def interrupt(number: int, _: object) -> None:
        nonlocal last, received
        now = time.monotonic()
        if now - last > IGNORE_S:
            last, received = now, number
            raise Interrupted(f"by {signal.Signals(number).name}{consequence}")

    def repeat(lost: sys.UnraisableHookArgs) -> None:  # Python drops exceptions that are raised in a finalizer
        nonlocal last
        if isinstance(lost.exc_value, Interrupted):
            last = float("-inf")
            threading.Timer(REPEAT_S, signal.pthread_kill, (threading.main_thread().ident, received)).start()
        else:
            report(lost)

    before = {name: signal.signal(name, interrupt) for name in INTERRUPTS}
    report, sys.unraisablehook = sys.unraisablehook, repeat
    try:
        yield
    finally:
        sys.unraisablehook = report
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def first_interrupt(request: Callable[[], bool]) -> Iterator[None]:
    """Call `request` on the first Ctrl-C. Interrupt the run if `request` returns False or if the user presses Ctrl-C again."""
    interrupt = signal.getsignal(signal.SIGINT)
    assert callable(interrupt)

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, interrupt)
        if not request():
            interrupt(number, frame)

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block `signals` until the `with` statement ends. Processes that are started meanwhile inherit the blocked signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_prctl: Callable[..., int] = ctypes.CDLL(None).prctl  # looked up on import: a lookup after fork is unsafe


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies (PR_SET_PDEATHSIG)."""
    _prctl(1, number)

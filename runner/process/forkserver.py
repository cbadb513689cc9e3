"""The child processes of meshrunner: all are forked by one warm forkserver, and none outlives its parent."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, NoReturn

from meshrunner.runner.process.signals import STOP_REQUESTS, in_slurm_job
from meshrunner.runner.process.tree import die_with_parent

PRELOAD = [
    "meshrunner.runner.process.preload",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # the first optimizer step would import it: 0.5 s
    "meshrunner.recipes.pretrain",
    "meshrunner.recipes.model.transformer",
    "meshrunner.recipes.parallelism.fsdp2",
    "meshrunner.recipes.data.stdlib",
    "meshrunner.runner.measure.meter",
    "meshrunner.runner.launch.worker",
    "meshrunner.runner.config.experiment",
]
"""Modules that the forkserver imports before it forks. Never a user's: an exception there would end the forkserver."""

context = multiprocessing.get_context("forkserver")
END_SIGNAL = signal.SIGUSR2
"""The signal that ends a child after its stack is written to its log. Not SIGTERM: SLURM sends that to every process of a job
to request a stop, and only the launcher may act on it."""


def shared_integers(count: int) -> Any:
    """Integers shared by a process and its children, without a lock: each integer has one writer."""
    return RawArray("q", count)


def warm() -> None:
    """Start the forkserver; it imports torch in the background. Takes milliseconds."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    # Inherited by the forkserver: only the launcher handles Ctrl-C. Here it is blocked until the forkserver is started.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Inherited, too.
    handlers = {name: signal.signal(name, signal.SIG_IGN) for name in (STOP_REQUESTS if in_slurm_job() else ())}
    safe_path = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # no file of the current directory may shadow a preloaded module
    try:
        resource_tracker.ensure_running()  # the forkserver would start it, and unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
    finally:
        if safe_path is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe_path
        for name, handler in handlers.items():
            signal.signal(name, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_now(code: int) -> NoReturn:
    """Exit immediately; kill the forkserver, which may still be importing torch, and remove its folder of sockets."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def enter(log: Path, environment: dict[str, str], path: list[str]) -> None:
    """
    Initialise a child process: redirect its output, ignore Ctrl-C, die with its parent.

    Args:
        log: file to which stdout and stderr are appended.
        environment: replaces the environment, which a child inherits from the start of the forkserver.
        path: replaces sys.path, for the same reason.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    gc.freeze()  # the forkserver's modules stay, in shared pages
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(2)
    faulthandler.register(END_SIGNAL, 2, chain=True)  # a hung process writes its stack
    threading.Thread(target=_die_with_launcher, daemon=True, name="die with launcher").start()
    die_with_parent(signal.SIGKILL)  # the parent of this process is the forkserver
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


def _die_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)

"""The processes meshrunner starts: all come from one warm forkserver and none outlives the process that started it."""

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
"""What the forkserver imports before it forks. Never a user's module: an exception there would end the forkserver."""

context = multiprocessing.get_context("forkserver")
END = signal.SIGUSR2
"""What ends a child in order: its stack goes to its log. SIGTERM is not used, because SLURM sends it to every process of a
job that is requested to stop, and only the command line may act on that."""


def shared_integers(count: int) -> Any:
    """Integers that a process and its children see, without a lock: each has one writer."""
    return RawArray("q", count)


def warm() -> None:
    """Start the forkserver, which imports torch while this process continues. Takes milliseconds."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    # Inherited: Ctrl-C belongs to the command line alone. Here it is only held back until the forkserver is started.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    requests = STOP_REQUESTS if in_slurm_job() else ()
    handlers = {name: signal.signal(name, signal.SIG_IGN) for name in requests}  # inherited, too
    safe_path = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # nothing of the current directory may shadow what is preloaded
    try:
        resource_tracker.ensure_running()  # the forkserver would start it, and unblock SIGINT while doing so
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
    """End this process at once, without what multiprocessing would leave behind: the forkserver, which may still be
    importing torch, and its folder for sockets."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def enter(log: Path, environment: dict[str, str], path: list[str]) -> None:
    """
    What a child process does first: write to its log, leave Ctrl-C to its parent, end when its parent ends.

    Args:
        log: appended to by stdout and stderr.
        environment: replaces the environment, which in a forkserver's child is that of the forkserver's start.
        path: replaces sys.path, for the same reason.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    gc.freeze()  # what the forkserver imported stays, and stays shared
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(2)
    faulthandler.register(END, 2, chain=True)  # a hung process says where it hangs
    threading.Thread(target=_follow_parent, daemon=True, name="follow parent").start()
    die_with_parent(signal.SIGKILL)  # the forkserver's end is this process's end, too
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)

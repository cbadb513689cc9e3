"""The child processes of meshrunner: all are forked by one warm forkserver, and none outlives its parent."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from meshrunner.runner.process.signals import STOP_REQUESTS, blocked, in_slurm_job
from meshrunner.runner.process.temporary import VARIABLE, remove, temporary_folder
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
_variables: Mapping[str, str] | None = None
"""What was added to the environment of the forkserver; None before it was started."""
END_SIGNAL = signal.SIGUSR2
"""The signal that ends a child after its stack is written to its log. Not SIGTERM: SLURM sends that to every process of a job
to request a stop, and only the launcher may act on it."""


def warm(variables: Mapping[str, str] | None = None) -> None:
    """
    Start the forkserver; it imports torch in the background. Takes milliseconds. Raises ConfigError.

    Args:
        variables: added to its environment. Libraries read many variables while they are loaded, for children too late; so a
            forkserver that was started with others is replaced. It must have no children then.
    """
    global _variables
    variables = variables or {}
    if variables == _variables:
        return
    if _variables is not None and (pid := _kill()):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing collects it, and starts another
    _variables = variables
    multiprocessing.set_forkserver_preload(PRELOAD)
    with ExitStack() as stack:
        # Inherited by the forkserver: only the launcher handles Ctrl-C. Here it is blocked until the forkserver is started.
        stack.enter_context(blocked({signal.SIGINT}))
        for name in STOP_REQUESTS if in_slurm_job() else ():  # inherited, too
            stack.callback(signal.signal, name, signal.signal(name, signal.SIG_IGN))
        temporary = temporary_folder()
        for variable, value in (
            *variables.items(),
            (VARIABLE, temporary),
            ("TORCHINDUCTOR_CACHE_DIR", f"{temporary}/inductor"),  # torch creates it on import; workers get their own
            ("PYTHONSAFEPATH", "1"),  # no file of the current directory may shadow a preloaded module
        ):
            stack.callback(_set_environment, variable, os.environ.get(variable))
            os.environ[variable] = value
        resource_tracker.ensure_running()  # the forkserver would start it, and unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()


def warm_if_cold() -> None:
    """Start the forkserver unless there is one, with whatever variables. Raises ConfigError."""
    if _variables is None:
        warm()


def _set_environment(variable: str, value: str | None) -> None:
    if value is None:
        del os.environ[variable]
    else:
        os.environ[variable] = value


def _kill() -> int | None:
    """Kill the forkserver, which may still be importing torch. Returns its process id; None: there is none."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid


def exit_now(code: int) -> NoReturn:
    """Exit immediately; kill the forkserver and remove the command's temporary files."""
    _kill()
    remove()
    os._exit(code)


def enter(log: Path, environment: dict[str, str], path: list[str]) -> None:
    """
    Initialise a child process: redirect its output, ignore Ctrl-C, die with its parent.

    Args:
        log: file to which stdout and stderr are appended.
        environment: replaces the environment, which a child inherits from the start of the forkserver.
        path: replaces sys.path, for the same reason.
    """
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:  # e.g. the run directory was moved; stderr is still the user's
        print(f"meshrunner: {log}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(1)
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
    tempfile.tempdir = None  # asked for by a preloaded module; TMPDIR may be another now
    sys.path[:] = path


def _die_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)

"""The forkserver that all child processes are forked from, with torch imported. No child outlives its parent."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any, NoReturn

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.process.signals import STOP_REQUESTS, blocked, die_with_parent, in_slurm_job

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
"""Modules that the forkserver imports before it forks. Never a user's module: an exception in it would end the forkserver."""

context = multiprocessing.get_context("forkserver")
_variables: Mapping[str, str] | None = None
"""Variables that were added to the forkserver's environment; None until it is started."""
END_SIGNAL = signal.SIGUSR2  # not SIGTERM, which SLURM sends to every process of a job, only for the launcher to act on
"""The signal that makes a child write its stack to its log and end."""
LONGEST = 40
"""Most bytes of the path in which `temporary_folder` is: the kernel limits the path of a socket to 107 bytes."""


def warm(variables: Mapping[str, str] | None = None) -> None:
    """
    Start the forkserver, which imports torch in the background. Return within milliseconds.

    `variables` are added to its environment, because libraries read many of them when they are loaded. They replace a forkserver
    that was started with others, which must have no children then; None keeps it.
    """
    global _variables
    if _variables is not None and variables in (None, _variables):
        return
    variables = variables or {}
    if _variables is not None and (pid := _kill()):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing reaps it and starts another
    _variables = variables
    multiprocessing.set_forkserver_preload(PRELOAD)
    temporary, before = temporary_folder(), dict(os.environ)
    own = {
        "MESHRUNNER_TEMPORARY": temporary,
        "TORCHINDUCTOR_CACHE_DIR": f"{temporary}/inductor",  # torch creates it on import; workers get their own
        "PYTHONSAFEPATH": "1",  # no file of the current directory may shadow a preloaded module
    }
    with ExitStack() as stack:
        # The forkserver inherits the blocked signal, so that only the launcher handles Ctrl-C.
        stack.enter_context(blocked({signal.SIGINT}))
        for name in STOP_REQUESTS if in_slurm_job() else ():  # inherited, too
            stack.callback(signal.signal, name, signal.signal(name, signal.SIG_IGN))
        stack.callback(os.environ.update, before)
        for name_of_variable in {*variables, *own} - before.keys():
            stack.callback(os.environ.pop, name_of_variable)
        os.environ.update(variables)
        os.environ.update(own)
        resource_tracker.ensure_running()  # the forkserver would start it, and unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()


def temporary_folder() -> str:
    """
    Return the folder for the forkserver's socket and a command's other temporary files; raise ConfigError if there is none.

    The first call creates it. It is removed when the command ends, by the forkserver if the command is killed.
    """
    # multiprocessing would choose a folder in TMPDIR, however long its path is.
    settings: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is not None:
        return str(settings["tempdir"])
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"TMPDIR: {error.strerror}") from None
    for parent in (usual, "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(parent)) <= LONGEST:
            with suppress(OSError):
                settings["tempdir"] = folder = tempfile.mkdtemp(prefix="meshrunner-", dir=parent)
                atexit.register(_remove_temporary_folder)
                return folder
    raise ConfigError(f"TMPDIR: '{usual}' is too long a path for sockets, and /tmp and /var/tmp are not writable")


def _remove_temporary_folder() -> None:
    if folder := current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)


def _kill() -> int | None:
    """Kill the forkserver, which may still be importing torch. Return its process id, or None if none was started."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid


def exit_now(code: int) -> NoReturn:
    """Kill the forkserver, remove the command's temporary files and exit immediately."""
    _kill()
    _remove_temporary_folder()
    os._exit(code)


def enter(log: Path, environment: dict[str, str], path: list[str]) -> None:
    """
    Initialise a child process: append its output to a log, ignore Ctrl-C, die with its parent.

    The environment and sys.path are replaced: the forkserver copied them when it was started.
    """
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:  # the run directory was moved, say; stderr is still the user's terminal
        print(f"meshrunner: {log}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(1)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    gc.freeze()  # keeps the pages of the forkserver's modules shared
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(2)
    faulthandler.register(END_SIGNAL, 2, chain=True)  # a hung process writes its stack
    threading.Thread(target=_die_with_launcher, daemon=True, name="die with launcher").start()
    die_with_parent(signal.SIGKILL)  # the parent of this process is the forkserver
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # a preloaded module may have cached another TMPDIR
    sys.path[:] = path


def _die_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)

"""The forkserver: a process that imports torch once and then forks every child process. No child process outlives the command."""

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
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
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
    "torch._dynamo",  # otherwise the first optimizer step imports torch._dynamo, which takes 0.5 s
    "meshrunner.recipes.pretrain",
    "meshrunner.recipes.model.transformer",
    "meshrunner.recipes.parallelism.fsdp2",
    "meshrunner.recipes.data.stdlib",
    "meshrunner.runner.measure.meter",
    "meshrunner.runner.launch.worker",
    "meshrunner.runner.config.experiment",
]
"""Modules that the forkserver imports before it forks. The list has no user modules: their errors would end the forkserver."""

context = multiprocessing.get_context("forkserver")
_variables: Mapping[str, str] | None = None
"""Environment variables that `warm` set for the forkserver only; None if the forkserver has not been started."""
END_SIGNAL = signal.SIGUSR2  # not SIGTERM: SLURM sends SIGTERM to every process, and only the launcher may react
"""Signal that makes a child process write its Python stack to its log and then end."""
LONGEST = 40
"""Maximum path length, in bytes, of the directory that contains `temporary_folder`. Socket paths are limited to 107 bytes."""


def warm(variables: Mapping[str, str] | None = None) -> None:
    """Start the forkserver, which imports torch in the background, and return within milliseconds. The forkserver's environment
    includes `variables`, because some libraries read variables only on import. Keep a running forkserver if it has the same
    variables or if `variables` is None. Otherwise, kill and replace it. A replaced forkserver must not have children."""
    global _variables
    if _variables is not None and variables in (None, _variables):
        return
    variables = variables or {}
    if _variables is not None and (pid := _kill()):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing reaps the process and starts a new one
    _variables = variables
    multiprocessing.set_forkserver_preload(PRELOAD)
    temporary, before = temporary_folder(), dict(os.environ)
    own = {
        **variables,
        "MESHRUNNER_TEMPORARY": temporary,
        "TORCHINDUCTOR_CACHE_DIR": f"{temporary}/inductor",  # torch creates this folder on import; workers use another folder
        "PYTHONSAFEPATH": "1",  # no file of the current directory may shadow a preloaded module
    }
    with ExitStack() as stack:
        # The forkserver inherits the blocked signal, so that only the launcher handles Ctrl-C.
        stack.enter_context(blocked({signal.SIGINT}))
        for name in STOP_REQUESTS if in_slurm_job() else ():  # the forkserver also inherits ignored signals
            stack.callback(signal.signal, name, signal.signal(name, signal.SIG_IGN))
        stack.callback(os.environ.update, before)
        for name_of_variable in own.keys() - before.keys():
            stack.callback(os.environ.pop, name_of_variable)
        os.environ.update(own)
        resource_tracker.ensure_running()  # do this first, because starting the tracker unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()


def temporary_folder() -> str:
    """Return the folder for the forkserver's socket and other temporary files. The first call creates the folder, or raises
    ConfigError. The command removes the folder on exit. If the command is killed, the forkserver removes the folder."""
    # multiprocessing would choose a folder in TMPDIR even if the path is too long for a socket.
    settings: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is not None:
        return str(settings["tempdir"])
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"TMPDIR: {error.strerror}; use a writable directory") from None
    for parent in (usual, "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(parent)) <= LONGEST:
            with suppress(OSError):
                settings["tempdir"] = folder = tempfile.mkdtemp(prefix="meshrunner-", dir=parent)
                atexit.register(_remove_temporary_folder)
                return folder
    raise ConfigError(f"TMPDIR: '{usual}' is too long for sockets or not writable; use a short, writable directory")


def _remove_temporary_folder() -> None:
    if folder := current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)


def _kill() -> int | None:
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid


def exit_now(code: int) -> NoReturn:
    """Kill the forkserver, remove the command's temporary files and exit immediately."""
    _kill()
    _remove_temporary_folder()
    os._exit(code)


def child(
    log: Path, environment: Mapping[str, str], body: Callable[..., int], *arguments: Any, **options: Any
) -> ForkServerProcess:
    """Return a process that, once started, calls `body(*arguments)` with `environment` and the launcher's sys.path, and exits
    with the code that `body` returns. The process appends its output to `log`, ignores Ctrl-C, and dies with the launcher."""
    return context.Process(target=_run, args=(log, dict(environment), list(sys.path), body, arguments), **options)


def _run(
    log: Path, environment: dict[str, str], path: list[str], body: Callable[..., int], arguments: tuple[Any, ...]
) -> NoReturn:
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:  # for example, the run directory was moved; stderr is still the user's terminal
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
    code = 1
    try:
        code = body(*arguments)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a regular exit may hang in a library's thread, or in DDP without its process group


def _die_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)

"""The command line: dispatch to a verb, its exit status, and the errors a user can cause. Imports only what the verb needs."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import NoReturn

from meshrunner.runner.process.streams import output_is_lost, secure_streams

HELP = """\
usage: meshrunner VERB ...

  run    [OVERRIDES] [-m]    train; with -m, a sweep over every combination
  resume DIR [--force]       execute a run directory from its newest checkpoint, or the unfinished runs of a sweep directory
  show   [OVERRIDES]         parameters, FLOPs, mesh, memory per device, wrap plan; --config: the configuration; starts nothing
  plan   [OVERRIDES] [-m]    whether it fits and how fast it would be, without a GPU; -m: a grid, ranked; --json; starts nothing
  plan   --active            what tensors hold alone, faster; --max KEY: the largest value of a key with which it fits
  plan   --html FILE         also a page that shows memory over a step, at full depth; of one run
  calibrate DIR [DIR...]     fits what `plan` knows of a device to measured runs; --out FILE, --force, --json
  compare DIR [DIR...]       which settings vary between runs, what they change, whether the losses agree; -h lists its options
  ls     [DIR...]            runs and sweeps below a folder, newest first; --where state=oom, --limit N, --json
  status DIR [DIR...]        the progress of every run of a sweep, also while it is running
  submit [OVERRIDES] [-m]    write run directories and submit them to SLURM; --dry-run prints the script and does nothing
  submit DIR                 submit again the unfinished runs of a run or sweep directory
  cancel DIR                 stop running and waiting runs
  place  [OVERRIDES] [-m]    write run directories, start nothing
  sync DIR [--dry-run]       upload the W&B runs below a directory that were recorded offline
  doctor                     what this machine has, what is missing and why it matters
  help   KEY                 what a key, group or option means, may be and is by default: help lr; --config-dir DIR: yours, too
  schema [GROUP]             a JSON schema of config.yaml, or of the files of a group, for editors
  --version                  versions of meshrunner, torch and Python

OVERRIDES are Hydra's: model=llama3_8b parallelism.shard=4 +key=value ~key. `meshrunner run --help` lists groups and keys.

exit status: 0 every run ended as asked; 1 a run failed;
             2 the configuration is wrong, nothing was started;
             75 preempted, may be run again; 130 interrupted"""

VERBS = (
    "run",
    "resume",
    "show",
    "plan",
    "calibrate",
    "compare",
    "ls",
    "status",
    "submit",
    "cancel",
    "place",
    "sync",
    "doctor",
    "help",
    "schema",
)
"""Names of modules in runner/verbs, each with a function of the same name: arguments in, exit status out."""
HELP_COLUMN = 29
"""Where the help text says what a verb does."""
MODULES = {
    "run": "launching.run",
    "resume": "launching.resume",
    "place": "launching.place",
    "submit": "launching.submit",
    "show": "planning.show",
    "plan": "planning.plan",
    "calibrate": "planning.calibrate",
    "compare": "records.compare",
    "ls": "records.ls",
    "status": "records.status",
    "cancel": "records.cancel",
    "sync": "records.sync",
    "doctor": "doctor",
    "help": "help",
    "schema": "help",
}
"""The module of each verb, below runner/verbs."""
WITHOUT_OPTIONS = ("resume", "status", "cancel", "doctor", "help", "schema")
"""Verbs of which the help text above says everything."""


EXECUTING = ("run", "resume")
"""Verbs whose result is a run directory; what the others print is their result."""


def main() -> NoReturn:
    """Entry point; exits with a status of the help text."""
    signal.signal(signal.SIGINT, _interrupted)  # imports sometimes swallow a KeyboardInterrupt
    secure_streams()
    here = _current_directory()
    # A user's own classes may live here. Last: nothing here may shadow what is imported from elsewhere.
    sys.path[:] = [*(entry for entry in sys.path if entry not in ("", here)), *([here] if here else [])]
    code = _dispatch(sys.argv[1:])
    if output_is_lost() and not {*sys.argv[1:2]} & {*EXECUTING}:
        code = code or 1
    _exit(code)


def _current_directory() -> str | None:
    """The current directory; None when it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return None


def _interrupted(_: int, __: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"interrupted; nothing was started\n")
    _exit(130)


def _exit(code: int) -> NoReturn:
    """Exit immediately: nothing in the background may delay the exit or change its status."""
    # A signal may arrive while the module is being imported: then there is no forkserver to kill.
    forkserver = sys.modules.get("meshrunner.runner.process.forkserver")
    exit_now: Callable[[int], NoReturn] = getattr(forkserver, "exit_now", os._exit)
    exit_now(code)


def _dispatch(arguments: list[str]) -> int:
    if "-sc" in arguments or "--shell-completion" in arguments:  # the shell calls without a verb
        from meshrunner.runner.completion import answer

        return answer(arguments, VERBS)
    if "--version" in arguments:
        print(_versions())
        return 0
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["help"]:
        print(_fitted(HELP))
        return 0 if arguments else 2
    if asked := _asked(arguments):
        print(_fitted("\n".join(line for line in HELP.splitlines() if line.startswith(f"  {asked} "))))
        return 0
    if arguments[0] not in VERBS:
        from meshrunner.recipes.option import did_you_mean
        from meshrunner.runner.console import say

        hint = did_you_mean(arguments[0], VERBS)
        say(f"meshrunner: unknown verb '{arguments[0]}'.{hint}\n\n{_fitted(HELP)}", to_stderr=True)
        return 2
    return _run_verb(*arguments)


def _fitted(text: str) -> str:
    """The help text in a terminal that is narrower than its lines: what a verb does stays in its column."""
    if not sys.stdout.isatty():
        return text
    from textwrap import wrap

    from meshrunner.runner.console import columns

    width, indent = columns(), " " * HELP_COLUMN
    lines = [
        wrap(line, width, subsequent_indent=indent if line.startswith("  ") else "", replace_whitespace=False) or [""]
        for line in text.splitlines()
    ]
    return "\n".join(line for wrapped in lines for line in wrapped)


def _versions() -> str:
    """Of meshrunner and of what its figures depend on; torch is not imported."""
    import platform
    from importlib.metadata import version

    from meshrunner import __version__

    return f"meshrunner {__version__}, torch {version('torch')}, Python {platform.python_version()}"


def _asked(arguments: list[str]) -> str:
    """The verb that is asked for, where the help text above has all that there is to say of it; else empty."""
    if len(arguments) == 2 and arguments[0] == "help" and arguments[1] in VERBS:
        return arguments[1]
    if arguments[1:] in (["-h"], ["--help"]) and arguments[0] in WITHOUT_OPTIONS:
        return arguments[0]
    return ""


def _run_verb(verb: str, *arguments: str) -> int:
    """Run a verb; turn the errors a user can cause into one screen and an exit status."""
    try:
        module = import_module(f"meshrunner.runner.verbs.{MODULES[verb]}")
        function: Callable[[list[str]], int] = getattr(module, verb)
        return function(list(arguments))
    except (Exception, KeyboardInterrupt) as error:
        known = _explained(error, arguments)
        if known is None:
            raise
        from meshrunner.runner.console import say

        code, text = known
        say(text, to_stderr=True)
        return code


def _explained(error: BaseException, arguments: tuple[str, ...]) -> tuple[int, str] | None:
    """Exit status and text for an error a user can cause; None for a fault of this program."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from meshrunner.recipes.errors import AlreadyRunning, ConfigError, Interrupted, Moved
    from meshrunner.runner.own_code import fault

    if isinstance(error, Interrupted):
        return 130, f"interrupted {error}"
    if isinstance(error, AlreadyRunning | Moved):
        return 1, str(error)
    if isinstance(error, FileNotFoundError) and _current_directory() is None:
        return 2, "the current directory was removed: change into one that exists"
    if isinstance(error, ConfigError):
        return 2, str(error)
    if isinstance(error, Exception) and (own := fault(error)):
        return 2, own
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return 2, f"{str(error.filename)[:200]}: {error.strerror}"
    wrong_input = HydraException | OmegaConfBaseException | YAMLError
    if isinstance(error, wrong_input) or type(error) in (ValueError, UnicodeDecodeError, RecursionError):
        from meshrunner.runner.config.hydra_errors import explain

        return 2, explain(error, [a for a in arguments if not a.startswith("-")])
    return None

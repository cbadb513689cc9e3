"""The command line: run the verb (`meshrunner VERB`), print user errors without a traceback, and exit with a status."""

from __future__ import annotations

import errno
import gc
import os
import sys
from importlib import import_module

from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.process.streams import output_is_lost, secure_streams

TYPE_CHECKING = False  # importing it from `typing` would slow down `--help`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

HELP = {"-h", "--help"}


def main() -> NoReturn:
    """Run the command line and exit with one of the statuses that `meshrunner --help` lists."""
    secure_streams()
    if "MESHRUNNER_RECEIPT" in os.environ:
        import_module("meshrunner.runner.process.receipt").accept()
    try:
        here = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        print("the current directory was removed: change into one that exists", file=sys.stderr, flush=True)
        os._exit(2)
    # The current directory may contain a user's own classes. It is last in sys.path, so that it shadows no installed module.
    sys.path[:] = [*(entry for entry in sys.path if entry not in ("", here)), here]
    code = _dispatch(sys.argv[1:])
    command = COMMANDS.get(sys.argv[1]) if sys.argv[1:] else None
    if output_is_lost() and not (command and command.executes):
        code = code or 1
    # Exit immediately: nothing in the background may delay the exit or change its status.
    forkserver = sys.modules.get("meshrunner.runner.process.forkserver")
    exit_now: Callable[[int], NoReturn] = forkserver.exit_now if forkserver else os._exit
    exit_now(code)


def _dispatch(arguments: list[str]) -> int:
    if "-sc" in arguments or "--shell-completion" in arguments:  # the shell calls meshrunner without a verb
        from meshrunner.runner.completion import answer

        return answer(arguments)
    if "--version" in arguments:
        from importlib.metadata import version
        from platform import python_version

        from meshrunner import __version__

        print(f"meshrunner {__version__}, torch {version('torch')}, Python {python_version()}")
        return 0
    if (topic := _help_topic(arguments)) is not None:
        from meshrunner.runner.commands.usage import describe, overview

        print(describe(COMMANDS[topic]) if topic else overview())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        from meshrunner.recipes.option import did_you_mean
        from meshrunner.runner.commands.usage import overview
        from meshrunner.runner.console import say

        hint = did_you_mean(arguments[0], COMMANDS)
        say(f"meshrunner: unknown verb '{arguments[0]}'.{hint}\n\n{overview()}", to_stderr=True)
        return 2
    return _run_verb(*arguments)


def _help_topic(arguments: list[str]) -> str | None:
    """Return the verb to explain, or "" to list all verbs. Return None if no help is requested, or if Hydra prints the help."""
    verb, *rest = arguments or ["help"]
    if verb in HELP or (verb == "help" and not rest):
        return ""
    if verb == "help" and len(rest) == 1 and rest[0] in COMMANDS:
        return rest[0]
    return verb if verb in COMMANDS and not COMMANDS[verb].overrides and HELP & set(rest) else None


def _run_verb(verb: str, *arguments: str) -> int:
    """Run a verb and return the exit status. Print user errors without a traceback; let other errors propagate."""
    if COMMANDS[verb].room == "records" or HELP & set(arguments):
        # Help and verbs that read records need no pydantic plugins. The search for them could take a tenth of the time.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    if COMMANDS[verb].room == "planning" and not {"-m", "--multirun"} & set(arguments):
        gc.disable()  # imports create little garbage, and a collection at the end would take a tenth of the time of `show`
    try:
        function: Callable[[list[str]], int] = getattr(import_module(COMMANDS[verb].module), verb)
        return function(list(arguments))
    except (Exception, KeyboardInterrupt) as error:
        if (known := _explained(error, arguments)) is None:
            raise
        from meshrunner.runner.console import say
        from meshrunner.runner.process.receipt import record

        code, text = known
        if not record("problem", text):
            say(text, to_stderr=True)
        return code


def _explained(error: BaseException, arguments: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the exit status and the message for a user error, or None if the error is a bug in meshrunner."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from meshrunner.recipes.errors import AlreadyRunning, ConfigError, Interrupted, Moved
    from meshrunner.runner.own_code import fault

    if isinstance(error, Interrupted):
        return 130, f"interrupted {error}"
    if isinstance(error, AlreadyRunning | Moved):
        return 1, str(error)
    if isinstance(error, ConfigError):
        return 2, str(error)
    if isinstance(error, Exception) and (own := fault(error)):
        return 2, own
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return 2, f"{str(error.filename)[:200]}: {error.strerror}"
    wrong_input = HydraException | OmegaConfBaseException | YAMLError
    if isinstance(error, wrong_input) or type(error) in (ValueError, UnicodeDecodeError, RecursionError):
        from meshrunner.runner.config.hydra.hydra_errors import explain

        return 2, explain(error, [a for a in arguments if not a.startswith("-")])
    return None

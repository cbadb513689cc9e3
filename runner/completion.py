"""Tab completion for bash and zsh, installed by `eval "$(meshrunner -sc install=bash)"`. zsh needs bashcompinit."""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.console import say
from meshrunner.runner.rundir.files import is_run, is_sweep

if TYPE_CHECKING:
    from meshrunner.runner.commands.declaration import Value

INSTALL = """\
_meshrunner_complete() {
    local candidate
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("$candidate")
    done < <(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_WORD="$2" "$1" -sc query=bash 2>/dev/null)
}
complete -o nospace -o nosort -F _meshrunner_complete meshrunner 2>/dev/null ||
    complete -o nospace -F _meshrunner_complete meshrunner
"""
SPECIAL = re.compile(r"([^\w@%+=:,./~-])")
"""Characters that need a backslash in a shell."""


def answer(arguments: Sequence[str]) -> int:
    """Handle `-sc install=SHELL`, `-sc uninstall=SHELL` or `-sc query=SHELL`. Return the exit status."""
    request = next((word for word in arguments if re.match(r"(un)?install=|query=", word)), "")
    if request in ("install=bash", "install=zsh"):
        print(INSTALL, end="")
    elif request in ("uninstall=bash", "uninstall=zsh"):
        print("complete -r meshrunner; unset -f _meshrunner_complete")
    elif request.startswith("query="):
        with redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):
            *before, word = _typed_words()
            for candidate in candidates(before, word):
                print(_as_typed(candidate, word))
    else:
        say("meshrunner: -sc needs install=bash, install=zsh, uninstall=bash or uninstall=zsh", to_stderr=True)
        return 2
    return 0


def _typed_words() -> list[str]:
    """Return the unquoted words between the program's name and the cursor. COMP_POINT is the cursor's position in COMP_LINE."""
    typed = os.environ["COMP_LINE"].encode()
    line = typed[: int(os.environ.get("COMP_POINT") or len(typed))].decode(errors="ignore")
    words = shlex.split(line)  # raises ValueError if the cursor is inside quotes
    if not line or (line[-1].isspace() and not line.endswith("\\ ")):
        words.append("")
    return words[1:]


def _as_typed(candidate: str, word: str) -> str:
    """Return a completion, quoted for the shell. Cut off a leading `key=`, because bash replaces only the text after `=`."""
    part = os.environ.get("COMP_WORD")
    if part is None:
        return candidate
    unquoted = part if word.endswith(part) else "".join(shlex.split(part))
    cut = len(word) - len(unquoted) if word.endswith(unquoted) else 0
    end = "" if candidate.endswith(("=", ".", "/")) else " "
    return SPECIAL.sub(r"\\\1", candidate[cut:]) + end


def candidates(before: Sequence[str], word: str) -> list[str]:
    """Return the completions of `word`. `before` holds the words between the program's name and `word`."""
    if not before:
        return [known for known in (*COMMANDS, "--help") if known.startswith(word) and (word or known != "--help")]
    verb, *rest = before
    if verb not in COMMANDS:
        return []
    command = COMMANDS[verb]
    options = {flag: option for option in command.options for flag in option.flags}
    with_value = {flag for flag, option in options.items() if option.metavar}
    if rest and rest[-1] in with_value:
        return _values(options[rest[-1]].value, word, rest)
    if word.startswith("-"):
        return [flag for flag in options if flag.startswith(word)]
    own = [each for last, each in pairwise(["", *rest]) if last not in with_value and not each.startswith(("-", "~"))]
    given = [each for each in own if "=" not in each]
    several = [each for each in command.arguments if each.number in ("any", "several")]
    possible = command.arguments[len(given) : len(given) + 1] or several
    found = [value for argument in possible for value in _values(argument.value, word, rest)]
    if not command.overrides:
        return found
    from meshrunner.runner.commands.parser import split

    _, for_hydra = split(verb, rest)
    known = _overrides([each for each in for_hydra if each not in given], word, submits=verb == "submit")
    if given:  # run directories contain their configuration, so complete only SLURM settings
        return [each for each in known if each.startswith("hydra.launcher.")]
    return [*known, *found]


def _values(value: Value, word: str, rest: Sequence[str]) -> list[str]:
    if value in ("directory", "file"):
        return _paths(word, only_directories=value == "directory")
    known: Iterable[str] = value if isinstance(value, tuple) else ()
    if value == "group":
        from meshrunner.runner import shipped

        known = shipped.groups()
    if value == "term":
        known = _terms(word, rest)
    return [each for each in known if each.startswith(word)]


def _paths(word: str, *, only_directories: bool = False) -> list[str]:
    """Return paths that begin with `word`. With `only_directories`, skip files and list run and sweep directories first."""
    parent, slash, start = word.rpartition("/")
    paths: list[Path] = []
    with suppress(OSError):
        paths = sorted(Path(f"{parent}{slash}").expanduser().iterdir())
    paths = [path for path in paths if path.name.startswith(start) and (start or not path.name.startswith("."))]
    if only_directories:
        directories = (path for path in paths if path.is_dir())
        paths = sorted(directories, key=lambda path: not (is_run(path) or is_sweep(path)))
    return [f"{parent}{slash}{path.name}{'/' * path.is_dir()}" for path in paths]


def _terms(word: str, rest: Sequence[str]) -> list[str]:
    """Return the terms that `meshrunner help` explains: groups, keys, verbs or GROUP=OPTION. Omit nested keys if `word` is ""."""
    from meshrunner.runner import shipped
    from meshrunner.runner.commands.parser import parse
    from meshrunner.runner.verbs.reference.help import every_key

    group, equals, _ = word.partition("=")
    with shipped.also_in(parse("help", [*rest, word or "any"]).config_dir):
        if equals:
            return [f"{group}={option}" for option in shipped.options(group)] if group in shipped.groups() else []
        keys = (key.name for key in every_key() if word or "." not in key.name)
        return [*dict.fromkeys([*shipped.groups(), *keys, *COMMANDS])]


def _overrides(before: list[str], word: str, *, submits: bool) -> list[str]:
    """Return Hydra's completions of an override, or paths if Hydra offers no values. After a comma, complete the last value."""
    from meshrunner.runner.config.compose import Composer

    key, equals, value = word.partition("=")
    earlier, comma, last = value.rpartition(",")
    slurm = ["hydra/launcher=slurm"] if submits else []
    found = []
    if not last.startswith((".", "/", "~")):
        found = Composer("run", [*before, *slurm]).completions(f"{key}{equals}{last}")
    if not equals:
        return found
    values = [each.partition("=")[2] for each in found] or _paths(last)
    return [f"{key}={earlier}{comma}{value}" for value in values]

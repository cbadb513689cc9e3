"""Tab completion: `eval "$(meshrunner -sc install=bash)"`, also for zsh with bashcompinit. Errors are never shown."""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshrunner.runner.commands import COMMANDS, Command
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
UNINSTALL = "complete -r meshrunner; unset -f _meshrunner_complete\n"
SPECIAL = re.compile(r"([^\w@%+=:,./~-])")
"""Characters that a shell needs a backslash before."""


class Line(NamedTuple):
    """A command line up to the cursor."""

    before: list[str]
    """The words after the program's name and before the cursor's, unquoted."""
    word: str
    """The word to complete, unquoted."""


def answer(arguments: Sequence[str]) -> int:
    """Answer `-sc install=SHELL`, `uninstall=SHELL` or `query=SHELL`; returns the exit status."""
    request = next((word for word in arguments if re.match(r"(un)?install=|query=", word)), "")
    if request.startswith(("install=", "uninstall=")):
        return _install(request)
    with redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):
        line = read_line()
        for candidate in candidates(line):
            print(_as_typed(candidate, line.word))
    return 0


def _install(request: str) -> int:
    """Print the shell code that installs or removes completion. Hydra has it for other shells."""
    action, _, shell = request.partition("=")
    if shell in ("bash", "zsh"):
        print(INSTALL if action == "install" else UNINSTALL, end="")
        return 0
    from meshrunner.runner.config.compose import Composer
    from meshrunner.runner.config.hydra.overrides import parse

    Composer(parse("run", ["-sc", request])).answer_query()
    return 0


def read_line() -> Line:
    """Return the line in COMP_LINE, up to COMP_POINT."""
    typed = os.environ["COMP_LINE"].encode()
    line = typed[: int(os.environ.get("COMP_POINT") or len(typed))].decode(errors="ignore")
    words = shlex.split(line)  # raises ValueError inside of quotes
    if not line or (line[-1].isspace() and not line.endswith("\\ ")):
        words.append("")
    return Line(words[1:-1], words[-1])


def _as_typed(candidate: str, word: str) -> str:
    """Return a candidate as the shell inserts it: quoted, and without what bash takes for earlier words (`key=`)."""
    part = os.environ.get("COMP_WORD")
    if part is None:
        return candidate
    unquoted = part if word.endswith(part) else "".join(shlex.split(part))
    cut = len(word) - len(unquoted) if word.endswith(unquoted) else 0
    end = "" if candidate.endswith(("=", ".", "/")) else " "
    return SPECIAL.sub(r"\\\1", candidate[cut:]) + end


def candidates(line: Line) -> list[str]:
    """Return what the word can become."""
    verb, word = line.before[0] if line.before else "", line.word
    if not verb:
        return [known for known in (*COMMANDS, "--help") if known.startswith(word) and (word or known != "--help")]
    if verb not in COMMANDS:
        return []
    command, rest = COMMANDS[verb], line.before[1:]
    options = {flag: option for option in command.options for flag in option.flags}
    with_value = {flag for flag, option in options.items() if option.metavar}
    values = {i + 1 for i, flag in enumerate(rest) if flag in with_value}
    given = [each for i, each in enumerate(rest) if each[:1] not in ("-", "~") and "=" not in each and i not in values]
    if rest and rest[-1] in with_value:
        return _values(options[rest[-1]].value, word, rest)
    if word.startswith("-"):
        return [flag for flag in options if flag.startswith(word)]
    found = _values(command.arguments[0].value, word, rest) if _takes_another(command, len(given)) else []
    if not command.overrides:
        return found
    from meshrunner.runner.commands.parser import split

    _, for_hydra = split(verb, rest)
    known = _overrides([each for each in for_hydra if each not in given], word, submits=verb == "submit")
    if given:  # directories of runs that are placed already
        return [each for each in known if each.startswith("hydra.launcher.")]
    return [*known, *found]


def _takes_another(command: Command, given: int) -> bool:
    """Return whether a verb takes a positional argument after those given."""
    return any(given == 0 or argument.number in ("any", "several") for argument in command.arguments)


def _values(value: Value, word: str, rest: Sequence[str]) -> list[str]:
    """Return the values of an option or argument that begin with a word."""
    if isinstance(value, tuple):
        return [each for each in value if each.startswith(word)]
    if value == "group":
        from meshrunner.runner import shipped

        return [group for group in shipped.groups() if group.startswith(word)]
    if value == "term":
        return _terms(word, rest)
    return {"directory": directories, "file": files}.get(value, lambda _: [])(word)


def directories(word: str) -> list[str]:
    """Return directories that continue a path, with a slash; runs and sweeps before others."""
    found = sorted((not (is_run(path) or is_sweep(path)), shown) for shown, path in _entries(word) if path.is_dir())
    return [f"{shown}/" for _, shown in found]


def files(word: str) -> list[str]:
    """Return files and directories that continue a path."""
    return sorted(f"{shown}/" if path.is_dir() else shown for shown, path in _entries(word))


def _entries(word: str) -> Iterator[tuple[str, Path]]:
    """Yield the entries of a directory that continue a path: as typed, and as a path."""
    parent, slash, start = word.rpartition("/")
    with suppress(OSError):
        for path in Path(f"{parent}{slash}").expanduser().iterdir():
            if path.name.startswith(start) and (start or not path.name.startswith(".")):
                yield f"{parent}{slash}{path.name}", path


def _terms(word: str, rest: Sequence[str]) -> list[str]:
    """Return verbs, groups and sections; once a word is begun also keys, and after an equals sign options."""
    from meshrunner.runner import shipped
    from meshrunner.runner.commands.parser import parse
    from meshrunner.runner.verbs.reference.terms import every_key

    with shipped.also_in(parse("help", [*rest, word or "any"]).config_dir):
        group, equals, _ = word.partition("=")
        if equals:
            known = [f"{group}={option}" for option in shipped.options(group)] if group in shipped.groups() else []
        else:
            keys = (key.name for key in every_key() if word or "." not in key.name)
            known = [*dict.fromkeys([*shipped.groups(), *keys, *COMMANDS])]
        return [name for name in known if name.startswith(word)]


def _overrides(before: list[str], word: str, *, submits: bool) -> list[str]:
    """Return Hydra's groups, options and keys, also after the comma of a sweep; paths if Hydra knows no value."""
    from meshrunner.runner.config.compose import Composer
    from meshrunner.runner.config.hydra.overrides import parse

    key, equals, value = word.partition("=")
    earlier, comma, last = value.rpartition(",")
    slurm = ["hydra/launcher=slurm"] if submits else []
    found = []
    if not last.startswith((".", "/", "~")):
        found = Composer(parse("run", [*before, *slurm])).completions(f"{key}{equals}{last}")
    if not equals:
        return found
    values = [each.partition("=")[2] for each in found] or files(last)
    return [f"{key}={earlier}{comma}{value}" for value in values]

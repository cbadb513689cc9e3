"""Tab completion: `eval "$(meshrunner -sc install=bash)"`, also for zsh with bashcompinit. Nothing that goes wrong is shown."""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import NamedTuple

from meshrunner.runner.rundir.files import is_run, is_sweep

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
HYDRA_FLAGS = ("--help", "--hydra-help", "--config-dir", "--cfg", "--package", "--resolve", "--info")
FLAGS: dict[str, tuple[str, ...]] = {
    "run": ("-m", "--multirun", *HYDRA_FLAGS),
    "place": ("-m", "--multirun", *HYDRA_FLAGS),
    "submit": ("-m", "--multirun", "--dry-run", *HYDRA_FLAGS),
    "show": ("--config", *HYDRA_FLAGS),
    "plan": ("-m", "--multirun", "--json", "--active", "--max", "--html", *HYDRA_FLAGS),
    "calibrate": ("--out", "--force", "--json", "--help"),
    "resume": ("--force",),
    "sync": ("--dry-run",),
    "help": ("--config-dir",),
    "compare": ("--baseline", "--where", "--sort", "--top", "--markdown", "--json", "--csv", "--html", "--help"),
    "ls": ("--where", "--limit", "--json", "--help"),
}
"""Verb -> its flags."""
WITH_VALUE = {
    "--config-dir",
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--info",
    "-i",
    "--baseline",
    "--html",
    "--where",
    "--sort",
    "--top",
    "--limit",
    "--max",
    "--out",
}
"""Flags whose value is the next word."""
OVERRIDES = ("run", "place", "submit", "show", "plan")
"""Verbs that take Hydra's overrides."""
FOLDERS = {"resume": 1, "cancel": 1, "submit": 1, "status": 99, "calibrate": 99, "compare": 99, "ls": 99, "sync": 99}
"""Verb -> run and sweep directories that it takes."""
SPECIAL = re.compile(r"([^\w@%+=:,./~-])")
"""Characters that a shell needs a backslash for."""


class Line(NamedTuple):
    """A command line up to the cursor."""

    before: list[str]
    """The words after the program's name and before the cursor's, unquoted."""
    word: str
    """The word to complete, unquoted."""


def answer(arguments: Sequence[str], verbs: Sequence[str]) -> int:
    """Answer `-sc install=SHELL`, `uninstall=SHELL` or `query=SHELL`; returns the exit status."""
    request = next((word for word in arguments if re.match(r"(un)?install=|query=", word)), "")
    if request.startswith(("install=", "uninstall=")):
        return _install(request)
    with redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):
        line = read_line()
        for candidate in candidates(line, verbs):
            print(_as_typed(candidate, line.word))
    return 0


def _install(request: str) -> int:
    action, _, shell = request.partition("=")
    if shell in ("bash", "zsh"):
        print(INSTALL if action == "install" else UNINSTALL, end="")
        return 0
    from meshrunner.runner.config.compose import Composer, parse

    Composer(parse("run", ["-sc", request])).answer_query()
    return 0


def read_line() -> Line:
    """The line in COMP_LINE, up to COMP_POINT."""
    typed = os.environ["COMP_LINE"].encode()
    line = typed[: int(os.environ.get("COMP_POINT") or len(typed))].decode(errors="ignore")
    words = shlex.split(line)  # raises ValueError inside of quotes
    if not line or (line[-1].isspace() and not line.endswith("\\ ")):
        words.append("")
    return Line(words[1:-1], words[-1])


def _as_typed(candidate: str, word: str) -> str:
    """A candidate as the shell is to insert it: quoted, and without what bash takes for earlier words (`key=`)."""
    part = os.environ.get("COMP_WORD")
    if part is None:
        return candidate
    unquoted = part if word.endswith(part) else "".join(shlex.split(part))
    cut = len(word) - len(unquoted) if word.endswith(unquoted) else 0
    end = "" if candidate.endswith(("=", ".", "/")) else " "
    return SPECIAL.sub(r"\\\1", candidate[cut:]) + end


def candidates(line: Line, verbs: Sequence[str]) -> list[str]:
    """What the word can become."""
    if not line.before:
        return [verb for verb in (*verbs, "--help") if verb.startswith(line.word) and (line.word or verb != "--help")]
    verb, rest = line.before[0], line.before[1:]
    if verb not in verbs:
        return []
    if verb == "help":
        return _after_help(rest, line.word)
    if rest and rest[-1] in WITH_VALUE:
        return _value(rest[-1], line.word)
    if line.word.startswith("-"):
        return [flag for flag in FLAGS.get(verb, ()) if flag.startswith(line.word)]
    values = {i + 1 for i, word in enumerate(rest) if word in WITH_VALUE}
    given = [word for i, word in enumerate(rest) if word[:1] not in ("-", "~") and "=" not in word and i not in values]
    found = folders(line.word) if len(given) < FOLDERS.get(verb, 0) else []
    if verb not in OVERRIDES:
        return found
    known = _overrides(
        [word for word in rest if word not in (*given, "--dry-run")], line.word, submits=verb == "submit"
    )
    if given:  # runs that are placed
        return [each for each in known if each.startswith("hydra.launcher.")]
    return [*known, *found]


def _value(flag: str, word: str) -> list[str]:
    known = {"--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all")}
    if flag in known:
        return [value for value in known[flag] if value.startswith(word)]
    return {"--config-dir": folders, "--html": paths}.get(flag, lambda _: [])(word)


def folders(word: str) -> list[str]:
    """Folders that continue a path, with a slash; runs and sweeps before others."""
    found = sorted((not (is_run(path) or is_sweep(path)), shown) for shown, path in _entries(word) if path.is_dir())
    return [f"{shown}/" for _, shown in found]


def paths(word: str) -> list[str]:
    """Files and folders that continue a path."""
    return sorted(f"{shown}/" if path.is_dir() else shown for shown, path in _entries(word))


def _entries(word: str) -> Iterator[tuple[str, Path]]:
    """The entries of a folder that continue a path: as typed, and where they are."""
    parent, slash, start = word.rpartition("/")
    with suppress(OSError):
        for path in Path(f"{parent}{slash}").expanduser().iterdir():
            if path.name.startswith(start) and (start or not path.name.startswith(".")):
                yield f"{parent}{slash}{path.name}", path


def _after_help(rest: Sequence[str], word: str) -> list[str]:
    """One word that `help` explains, and --config-dir."""
    from meshrunner.runner.shipped import also_in
    from meshrunner.runner.verbs.help import split_config_dir

    words, config_dir = split_config_dir(rest)
    if config_dir == "":
        return folders(word)
    if word.startswith("-"):
        return [flag for flag in FLAGS["help"] if flag.startswith(word)]
    with also_in(config_dir):
        return [] if words else _explained(word)


def _explained(word: str) -> list[str]:
    """What `help` explains: groups and sections, once a word is begun also the keys in them, after an equals sign options."""
    from meshrunner.runner import shipped
    from meshrunner.runner.verbs.help import every_key

    group, equals, _ = word.partition("=")
    if equals:
        known = [f"{group}={option}" for option in shipped.options(group)] if group in shipped.groups() else []
    else:
        known = [*dict.fromkeys([*shipped.groups(), *(key.name for key in every_key() if word or "." not in key.name)])]
    return [name for name in known if name.startswith(word)]


def _overrides(before: list[str], word: str, *, submits: bool) -> list[str]:
    """Hydra's groups, options and keys; after the comma of a sweep, too. Paths where Hydra knows no value."""
    from meshrunner.runner.config.compose import Composer, parse

    key, equals, value = word.partition("=")
    earlier, comma, last = value.rpartition(",")
    slurm = ["hydra/launcher=slurm"] if submits else []
    found = []
    if not last.startswith((".", "/", "~")):
        found = Composer(parse("run", [*before, *slurm])).completions(f"{key}{equals}{last}")
    if not equals:
        return found
    values = [each.partition("=")[2] for each in found] or paths(last)
    return [f"{key}={earlier}{comma}{value}" for value in values]

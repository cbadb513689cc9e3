"""Reads option files without Hydra. For example, conf/model/llama3_8b.yaml is the option `llama3_8b` of the group `model`. There
are more than 80 options. Hydra's loader takes 0.2 s per option; this module takes 1 ms per option."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import takewhile
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.rundir import parse_yaml

LAUNCHERS = {"local": "Runs on this machine"}
"""Descriptions of launchers that have no file in conf/, keyed by launcher."""
EXPERIMENT, SPACE, LAUNCHER = "experiment", "space", "hydra/launcher"
"""The groups whose options have no `kind` key."""
GLOBAL = (EXPERIMENT, SPACE)
"""The groups whose options may set any key."""
own: list[Path] = []
"""The user's directories of options, in addition to conf/. `also_in` adds and removes these directories."""


@contextmanager
def also_in(config_dir: str | None) -> Iterator[None]:
    """Also search a user's --config-dir for options during the `with` block. Raise ConfigError if the directory is missing."""
    folder = Path(config_dir or ".").absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir: no such directory: {folder}")
    before = list(own)
    _search([*before, folder] if config_dir else before)
    try:
        yield
    finally:
        _search(before)


def _search(folders: list[Path]) -> None:
    own[:] = folders
    values.cache_clear()
    _files.cache_clear()


def own_kinds(group: str) -> list[str]:
    """Return the user's own classes for a group: each `package.module:Class` that is the `kind` in an option's file."""
    kinds = [str(values(group, option).get("kind")) for option in (_files(group) if own else ())]
    return list(dict.fromkeys(kind for kind in kinds if ":" in kind))


def groups() -> list[str]:
    """Return the groups, in the order of the defaults list in run.yaml."""
    return [*(group for group in defaults() if "/" not in group), LAUNCHER]


@cache
def defaults() -> dict[str, str | None]:
    """Return the default options, keyed by group."""
    entries = [entry for entry in _run_yaml()["defaults"] if isinstance(entry, dict)]
    return {group.removeprefix("override "): option for entry in entries for group, option in entry.items()}


def options(group: str) -> dict[str, str]:
    """Return descriptions keyed by option, the default first. A description is the first comment line of the option's file."""
    names = [*_files(group), *(LAUNCHERS if group == LAUNCHER else ())]
    first = defaults().get(group)
    return {name: about(group, name).split("\n")[0] for name in sorted(names, key=lambda name: (name != first, name))}


def about(group: str, option: str) -> str:
    """Return the comment at the top of an option's file, without its `#`s."""
    if option not in _files(group):
        return LAUNCHERS[option]
    comment = takewhile(lambda line: line.startswith("#"), file_text(group, option).splitlines())
    return "\n".join(line.removeprefix("#").strip() for line in comment if "@package" not in line)


def file_text(group: str, option: str) -> str:
    """Return the text of an option's file, or an empty string if the option has no file."""
    return _files(group)[option].read_text() if option in _files(group) else ""


@cache
def values(group: str, option: str) -> dict[str, Any]:
    """Return the keys and values of an option, including those of its base options. Leave interpolations unresolved."""
    found: dict[str, Any] = {}
    keys = parse_yaml(file_text(group, option))
    if not isinstance(keys, dict):
        return {}
    for base in keys.pop("defaults", []):
        if isinstance(base, str) and (base == "_self_" or base in _files(group)):
            found = _merged(found, keys if base == "_self_" else values(group, base))
    return _merged(found, keys)


def top_level() -> dict[str, Any]:
    """Return the keys and values of run.yaml, without its defaults list."""
    return {key: value for key, value in _run_yaml().items() if key != "defaults"}


@cache
def _run_yaml() -> dict[str, Any]:
    found: dict[str, Any] = parse_yaml(files("meshrunner.conf").joinpath("run.yaml").read_text())
    return found


@cache
def _files(group: str) -> dict[str, Traversable]:
    folders: list[Traversable] = [files("meshrunner.conf").joinpath(group)]
    folders += [folder / group for folder in own if (folder / group).is_dir()]  # later folders have priority
    return {
        path.name.removesuffix(".yaml"): path
        for folder in folders
        for path in folder.iterdir()
        if path.name.endswith(".yaml")
    }


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings as Hydra does. Values in `above` override values in `below`."""
    merged = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _merged(below[key], above[key])
    return merged


PICK = re.compile(r"\$\{pick:\$\{(?:hydra:runtime\.choices\.)?(?P<key>[^}]+)\},\{(?P<table>[^}]*)\},(?P<other>[^}]*)\}")


def picked(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (condition, value) pairs of a `${pick:...}`, such as ("model=llama3_405b", "8e-5"). The default has condition ""."""
    if isinstance(value, str) and (found := PICK.fullmatch(" ".join(value.split()))):
        alike: dict[str, list[str]] = {}
        for entry in found["table"].split(","):
            name, _, each = entry.partition(":")
            alike.setdefault(each.strip(), []).append(name.strip())
        for each, names in alike.items():
            yield f"{found['key']}={','.join(names)}", each
        yield "", found["other"].strip()

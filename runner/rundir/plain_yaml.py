"""Read the YAML of a run directory, which may be truncated or not ours: no aliases, deep nesting or endless numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from meshrunner.recipes.storage.durable import read_regular
from meshrunner.runner.rundir.files import YAML_BYTES

DEPTH = 100
"""Deepest nesting that is read."""
EXPLAINED_LENGTH = 16_000
"""Longest text, in characters, that is parsed a second time for a clearer message."""
LONGEST_NUMBER = 400
"""Characters; a longer number is beyond the range of a float in every base."""
C_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INDENTED = re.compile(rf"^[ ?:-]{{{DEPTH + 1}}}", re.MULTILINE)


class YamlLoader(C_LOADER):  # type: ignore[misc]
    """A loader on libyaml, ten times faster than the one in Python. Like OmegaConf's, it reads 1e-3 as a number."""


def _number(kind: str) -> Any:
    construct = getattr(yaml.SafeLoader, f"construct_yaml_{kind}")

    def bounded(loader: Any, node: Any) -> Any:
        if len(str(node.value)) > LONGEST_NUMBER:
            raise ValueError(f"it has a number of {len(str(node.value)):,} digits")
        return construct(loader, node)

    return bounded


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
for _kind in ("int", "float"):
    YamlLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number(_kind))


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises OSError, and ValueError that says how it is damaged."""
    value = parse_yaml(read_regular(path, YAML_BYTES).decode())
    if not isinstance(value, dict):
        raise ValueError("it is not a mapping")
    return {str(key): each for key, each in value.items()}


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises ValueError that says what is wrong with it."""
    # Checked before parsing: libyaml takes minutes for deep nesting, or overflows the stack.
    if _brackets(text) > DEPTH or INDENTED.search(text):
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
    try:
        # We write no aliases. A few of them can expand to gigabytes, or to a list that contains itself.
        if "&" in text and "*" in text and any(isinstance(e, yaml.AliasEvent) for e in yaml.parse(text, C_LOADER)):
            raise ValueError("it has aliases")
        return yaml.load(text, YamlLoader)
    except (yaml.YAMLError, RecursionError, OverflowError, TypeError) as error:
        raise ValueError(" ".join(_clearer(error, text).split())) from None


def _clearer(error: Exception, text: str) -> str:
    """Return the Python loader's message for a syntax error, which shows the line and recognises the end of the file."""
    if isinstance(error, yaml.YAMLError) and len(text) <= EXPLAINED_LENGTH:
        try:
            yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as clearer:
            return str(clearer)
    return str(error)


def _brackets(text: str) -> int:
    """Return how deep brackets are nested, including those in strings."""
    depth = deepest = 0
    for found in re.finditer(r"[\[\]{}]", text):
        depth = depth + 1 if found[0] in "[{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest

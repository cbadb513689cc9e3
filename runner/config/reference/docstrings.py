"""Docstrings below fields, read from the source on request, because commands that run something do not need them."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

from meshrunner.recipes.option import Section


def documentation(section: type[Section]) -> dict[str, str]:
    """Return field -> docstring on one line, for the fields of a class and of its base classes."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            found |= _in_module(base.__module__).get(base.__qualname__, {})
    return found


def summary(section: type[Section]) -> str:
    """Return the first paragraph of a class's docstring on one line."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].split())


@cache
def _in_module(name: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> docstring."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError, KeyError):  # the class was not imported from a file
        return {}
    return {node.name: _in_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _in_class(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found

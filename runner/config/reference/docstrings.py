"""The docstrings below fields. They are read from the source when they are asked for: commands that run nothing need them."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

from meshrunner.recipes.option import Section


def documentation(section: type[Section]) -> dict[str, str]:
    """Field -> its docstring on one line, of a class and the classes it is derived from."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            found |= _of_module(base.__module__).get(base.__qualname__, {})
    return found


def summary(section: type[Section]) -> str:
    """The docstring of a class on one line, up to the first empty line."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].split())


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Class -> field -> docstring."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError, KeyError):  # a class that was not imported from a file
        return {}
    return {node.name: _of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found

"""Names of modules that are written as text, where no type checker sees them, and names that are imported no more."""

from __future__ import annotations

import ast
import gc
from importlib import import_module

import pytest

from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.process.forkserver import PRELOAD
from tests.composed import CONF
from tests.unit.config.test_experiment import GROUPS

REPOSITORY = CONF.parent
OURS = ("conf", "recipes", "runner", "slurm")
"""Folders at the top: what is in them is imported as `meshrunner.recipes`, ..."""
SOURCES = [
    file
    for folder in (*OURS, "bench", "examples", "hydra_plugins", "package/meshrunner", "tests")
    for file in sorted((REPOSITORY / folder).rglob("*.py"))
]


@pytest.mark.parametrize("name", PRELOAD)
def test_what_the_forkserver_preloads_can_be_imported(name: str) -> None:
    """The forkserver says nothing of a name that it cannot import: workers would only start later."""
    collects = gc.isenabled()
    try:
        assert import_module(name).__name__ == name
    finally:
        if collects:
            gc.enable()  # the first of them stops it


@pytest.mark.parametrize(
    ("group", "kind"), [(group, kind) for group, base in GROUPS.items() for kind in base.kinds], ids=str
)
def test_every_kind_is_a_class_of_its_group(group: str, kind: str) -> None:
    found = GROUPS[group].resolve(kind)
    assert issubclass(found, GROUPS[group])
    assert GROUPS[group].kinds[kind] == f"{found.__module__}:{found.__name__}", "not by way of another module"


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_is_a_function_of_its_module(verb: str) -> None:
    assert callable(getattr(import_module(COMMANDS[verb].module), verb))


def test_folders_at_the_top_are_imported_as_parts_of_the_package() -> None:
    """In a checkout `import runner` would work, too: a second copy of every class, and nothing once it is installed."""
    assert len(SOURCES) > 200
    found = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found += [f"{file}:{node.lineno}: {name}" for name in names if name.partition(".")[0] in OURS]
    assert not found, "\n".join(found)

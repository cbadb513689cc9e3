"""Look up the effects of configuration keys, which the fields declare."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeGuard

from meshrunner.recipes.option import Affects, Option, Section

EXPERIMENT = "meshrunner.runner.config.experiment:Experiment"
"""The class that declares the top-level keys. It is imported on first use, because it is in a higher layer."""


def affecting(flat: dict[str, Any], effects: Affects) -> dict[str, Any]:
    """Return the keys of a flat configuration that affect any of `effects`."""
    return {key: value for key, value in flat.items() if affected_by(key, flat) & effects}


def affected_by(key: str, flat: dict[str, Any]) -> Affects:
    """
    Return the effects of a key of a flat configuration.

    A key that no shipped class declares, such as one of an older version, has the effects of its section. Classes of the user
    are not imported, because reading a configuration must not run their code.
    """
    kind = flat.get(f"{key.partition('.')[0]}.kind")
    return _affected_by(key, kind if isinstance(kind, str) else "")


@lru_cache(4096)
def _affected_by(key: str, kind: str) -> Affects:
    module, _, name = EXPERIMENT.partition(":")
    experiment: type[Section] = getattr(importlib.import_module(module), name)
    found, section = experiment.affects, experiment
    for part in key.split("."):
        field = next((each.model_fields[part] for each in _classes(section, kind) if part in each.model_fields), None)
        if field is None:
            break
        section = field.annotation if _is_section(field.annotation) else Section
        declared = [each for each in field.metadata if isinstance(each, Affects)]
        found = next(iter(declared), section.affects if section.affects is not None else found)
    assert found is not None
    return found


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _classes(section: type[Section], kind: str) -> Iterator[type[Section]]:
    """Yield the classes that may declare the keys of a section. For a group, the class of `kind` comes before the others."""
    yield section
    if issubclass(section, Option):
        yield from map(section.resolve, sorted(section.kinds, key=lambda shipped: shipped != kind))

"""Flatten, search and compare configurations. Look up what a change of a key affects, such as speed (class Affects)."""

import importlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from pydantic_core import to_jsonable_python

from meshrunner.recipes.option import Affects, Option, Section


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert a nested configuration to a flat one with dotted keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def value_at(values: Any, path: str) -> Any:
    """Return the value at a dotted path in nested mappings, or `...` if the path does not exist."""
    for part in path.split(".") if path else ():
        if not isinstance(values, dict) or part not in values:
            return ...
        values = values[part]
    return values


def with_value(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of nested mappings with another value at a dotted path. Create missing mappings along the path."""
    name, _, rest = path.partition(".")
    below = values.get(name)
    return values | {name: with_value(below if isinstance(below, dict) else {}, rest, value) if rest else value}


def same_value(one: Any, other: Any) -> bool:
    """Return whether two settings are equal. 1 equals 1.0, but not true or '1'."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) for every key whose value differs. A missing key has the value `...`."""
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{path}." if path else ""
        deeper = [differences(old.get(key, ...), new.get(key, ...), f"{prefix}{key}") for key in old | new]
        return [each for found in deeper for each in found]
    return [] if old == new else [(path, old, new)]


SHARED = ("model", "data", "launch", "sweep")
"""Default sections of `with_defaults`. In these sections, runs that can be compared have the same keys."""


def with_defaults(config: dict[str, Any], sections: Iterable[str] = SHARED) -> dict[str, Any]:
    """Return a resolved configuration, completed with the defaults of missing keys at the top level and in the given sections.
    Keys are missing if an older version wrote config.yaml."""
    found = config | _defaults("", "") | config  # given keys come first and keep their values
    for name in sections:
        if isinstance(section := config.get(name), dict):
            found[name] = section | _defaults(name, str(section.get("kind"))) | section
    return found


@lru_cache
def _defaults(section: str, kind: str) -> dict[str, Any]:
    """Return the defaults of a section's keys, or of the top-level keys if `section` is empty. A user's class is not imported,
    because reading a configuration must not run its code."""
    declared: Any = _experiment()
    if section:  # `check_existing` may pass a section that Experiment does not declare
        field = declared.model_fields.get(section)
        declared = field.annotation if field is not None else Section
    if issubclass(declared, Option):
        declared = declared.resolve(kind) if kind in declared.kinds else declared
    fields = declared.model_fields.items()
    return {key: to_jsonable_python(each.get_default()) for key, each in fields if not each.is_required()}


def _experiment() -> type[Section]:
    # The top-level keys are declared in `runner`, which imports this module, so their class is imported on first use.
    experiment: type[Section] = importlib.import_module("meshrunner.runner.config.experiment").Experiment
    return experiment


def affecting(flat: dict[str, Any], effects: Affects) -> dict[str, Any]:
    """Return those settings of a flat configuration that, if changed, have at least one of the given effects."""
    return {key: value for key, value in flat.items() if affected_by(key, flat) & effects}


def affected_by(key: str, flat: dict[str, Any]) -> Affects:
    """Return the effects of changing a key of the flat configuration `flat`. A key that no shipped class declares has the effects
    of its section. Users' classes are not imported, because reading a configuration must not run their code."""
    kind = flat.get(f"{key.partition('.')[0]}.kind")
    return _affected_by(key, kind if isinstance(kind, str) else "")


@lru_cache(4096)
def _affected_by(key: str, kind: str) -> Affects:
    experiment = _experiment()
    found, section = experiment.affects, experiment
    for part in key.split("."):
        field = next((each.model_fields[part] for each in _classes(section, kind) if part in each.model_fields), None)
        if field is None:
            break
        nested = field.annotation
        section = nested if isinstance(nested, type) and issubclass(nested, Section) else Section
        declared = [each for each in field.metadata if isinstance(each, Affects)]
        found = next(iter(declared), section.affects if section.affects is not None else found)
    assert found is not None
    return found


def _classes(section: type[Section], kind: str) -> Iterator[type[Section]]:
    """Yield the classes that may declare a section's keys. The section's class comes first. For a group, all options follow,
    beginning with the option `kind`."""
    yield section
    if issubclass(section, Option):
        yield from map(section.resolve, sorted(section.kinds, key=lambda shipped: shipped != kind))

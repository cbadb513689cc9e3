"""The catalogue of all keys of a configuration: their names, documentation, expected values and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Option, Section
from meshrunner.runner import shipped
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.reference.docstrings import documentation
from meshrunner.runner.config.reference.expected import Expected
from meshrunner.runner.config.reference.json_schema import is_group, section_schema

INDEX = re.compile(r"\[\w*\]")
MEMBER = re.compile(r"^tracker\.of\.\w+(?=\.)")


class Key(NamedTuple):
    """A key that a configuration can hold."""

    name: str
    """Its name on the command line. `wrap.rules[].match` is a key of every entry of a list."""
    field: str
    owners: Mapping[str, type[Section]]
    """Kind -> the class with the field. The kind is empty outside of groups."""

    @property
    def group(self) -> str:
        """The group whose options have it; for a key of no group, the first part of its name."""
        return shipped.LAUNCHER if self.name.startswith("hydra.launcher") else self.name.partition(".")[0]

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    def documentation(self) -> dict[str, list[str]]:
        """Return docstring -> the kinds that have it."""
        found: dict[str, list[str]] = {}
        for kind, owner in self.owners.items():
            found.setdefault(documentation(owner).get(self.field, ""), []).append(kind)
        return found

    def expected(self, *, whole: bool = False) -> str:
        """Return the values it may have, in words. whole: list all names, however many."""
        found = []
        for owner in dict.fromkeys(self.owners.values()):
            if self.field == "kind" and issubclass(owner, Option):
                return f"{', '.join(owner.kinds)} or package.module:Class of your own"
            schema = section_schema(owner)
            found.append(Expected(schema.get("$defs", {})).words(schema["properties"][self.field], whole=whole))
        return "; or ".join(dict.fromkeys(found))

    def defaults(self) -> dict[str, Any]:
        """Return option -> value, for the options that have it. A key of no group has one value, with the option ``."""
        if self.group not in shipped.groups():
            found = value_at(shipped.top_level(), self.name)
            return {} if found is ... else {"": found}
        inside = self.name.removeprefix(self.group.replace("/", ".")).lstrip(".")
        values = {
            option: value_at(shipped.values(self.group, option), inside) for option in shipped.options(self.group)
        }
        return {option: value for option, value in values.items() if value is not ...}


def every_key(config: Mapping[str, Any] | None = None) -> Iterator[Key]:
    """Yield the keys of all options, including groups and sections; with a config, only of the options it has chosen."""
    for name, field in Experiment.model_fields.items():
        section = field.annotation
        yield Key(name, name, {"": Experiment})
        if isinstance(section, type) and issubclass(section, Option) and is_group(section):
            every = [*section.kinds, *shipped.own_kinds(name)]
            yield from keys_of(name, _classes(section, every if config is None else [value_at(config, f"{name}.kind")]))
        elif isinstance(section, type) and issubclass(section, Section):
            yield from keys_of(name, {"": section})


def check_class(group: str, option: str, kind: str) -> None:
    """Raise ConfigError if the class that an option of the user's names cannot be used."""
    base = Experiment.model_fields[group].annotation
    assert isinstance(base, type) and issubclass(base, Option)
    try:
        base.resolve(kind)
    except PydanticCustomError as error:
        raise ConfigError(f"{group}={option}: {error}") from None


def _classes(group: type[Option], kinds: Iterable[Any]) -> dict[str, type[Section]]:
    """Return kind -> class, for the classes that exist."""
    found: dict[str, type[Section]] = {}
    for kind in kinds:
        with suppress(PydanticCustomError):
            found[kind] = group.resolve(kind)
    return found


def keys_of(prefix: str, owners: Mapping[str, type[Section]]) -> Iterator[Key]:
    """Yield the keys of some classes below a name, including those of nested sections."""
    fields: dict[str, dict[str, type[Section]]] = {}
    for kind, owner in owners.items():
        for field in owner.model_fields:
            fields.setdefault(field, {})[kind] = owner
    for field, having in fields.items():
        yield Key(f"{prefix}.{field}", field, having)
        for kind, owner in having.items():
            inner, listed = _section_in(owner.model_fields[field].annotation)
            if inner is not None and not is_group(inner):
                yield from keys_of(f"{prefix}.{field}{'[]' if listed else ''}", {kind: inner})
                break


def matching(word: str, keys: list[Key]) -> list[Key]:
    """Return the key of that name, else all whose names end with it: `lr` is optimizer.lr."""
    name = plain(word)
    return [key for key in keys if plain(key.name) == name] or [
        key for key in keys if plain(key.name).endswith(f".{name}")
    ]


def plain(name: str) -> str:
    """Return a key's name without indices: `wrap.rules[0].match` is wrap.rules.match, `tracker.of.wandb.mode` tracker.mode."""
    return MEMBER.sub("tracker", INDEX.sub("", name))


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section that a field holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation, False) if issubclass(annotation, Section) else (None, False)
    for part in get_args(annotation):
        inner, listed = _section_in(part)
        if inner is not None:
            return inner, listed or get_origin(annotation) is list
    return None, False


def value_at(values: Any, path: str) -> Any:
    """Return the value at a path; `...` if there is none."""
    for part in path.split(".") if path else ():
        if not isinstance(values, dict) or part not in values:
            return ...
        values = values[part]
    return values

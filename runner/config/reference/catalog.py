"""The catalogue of all keys that a configuration can hold, with their documentation, accepted values and defaults. A section is a
class whose fields are keys. An option of a group, such as `optimizer=adamw`, is a section, and its key `kind` names the class."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, get_args, get_origin

from pydantic_core import PydanticCustomError, to_jsonable_python

from meshrunner.recipes.config_keys import value_at
from meshrunner.recipes.option import Option, Section
from meshrunner.runner import shipped
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.reference.json_schema import documentation, is_group, section_schema

INDEX = re.compile(r"\[\w*\]")
MEMBER = re.compile(r"^tracker\.of\.\w+(?=\.)")
TYPES = {"null": "null", "string": "text", "integer": "whole number", "number": "number"}
PLAIN = re.compile(r"[\w$(/.\\<~][^#]*(?<![:\s])")
"""Pattern of text that needs no quotes in YAML."""
HUGE = 2**62
"""Limits of 2**62 or more are not shown to users, because they only mean that a number must fit into 64 bits."""
LONG = 12
"""Maximum number of accepted names to list. Only the length of a longer list is shown: `one of 20 names`."""


class Key(NamedTuple):
    """A key that a configuration can hold."""

    name: str
    """Name of the key on the command line. `[]` means every item of a list: `wrap.rules[].match` is a key of each rule."""
    field: str
    owners: Mapping[str, type[Section]]
    """Classes that define the key, keyed by the `kind` of an option. For a key outside of groups, the only kind is ""."""

    @property
    def group(self) -> str:
        """Group whose options have the key, or the first part of the key's name if the key is in no group."""
        return shipped.LAUNCHER if self.name.startswith("hydra.launcher") else self.name.partition(".")[0]

    @property
    def leaf(self) -> str:
        """Last part of the key's name."""
        return self.name.rpartition(".")[2]

    def documentation(self) -> dict[str, list[str]]:
        """Map each docstring of the key to the kinds of options that have the docstring. Kinds may describe a key differently."""
        found: dict[str, list[str]] = {}
        for kind, owner in self.owners.items():
            found.setdefault(documentation(owner).get(self.field, ""), []).append(kind)
        return found

    def expected(self, *, whole: bool = False) -> str:
        """Describe the values that the key accepts. With `whole`, list all accepted names, even if there are more than LONG."""
        found = []
        for owner in dict.fromkeys(self.owners.values()):
            if self.field == "kind" and issubclass(owner, Option):
                return f"{', '.join(owner.kinds)} or package.module:Class of your own"
            schema = section_schema(owner)
            found.append(in_words(schema["properties"][self.field], schema.get("$defs", {}), whole=whole))
        return "; or ".join(dict.fromkeys(found))

    def defaults(self) -> dict[str, Any]:
        """Return the key's default in each option that has the key. Use the option name "" for a key outside of groups."""
        if self.group not in shipped.groups():
            found = value_at(shipped.top_level(), self.name)
            return {} if found is ... else {"": found}
        inside = self.name.removeprefix(self.group.replace("/", ".")).lstrip(".")
        values = {
            each: self._default_in(shipped.values(self.group, each), inside) for each in shipped.options(self.group)
        }
        return {option: value for option, value in values.items() if value is not ...}

    def _default_in(self, values: dict[str, Any], inside: str) -> Any:
        """Return the key's value in an option's file, or else the default of the option's class; `...` if there is none."""
        owner = self.owners.get(str(values.get("kind")))
        if owner is None or not lacks(values, inside) or (field := owner.model_fields[self.field]).is_required():
            return value_at(values, inside)
        return to_jsonable_python(field.get_default(call_default_factory=True), fallback=str)


def every_key(config: Mapping[str, Any] | None = None) -> Iterator[Key]:
    """Yield all keys. If `config` is given, restrict the keys of each group to the `kind` that `config` chooses."""
    for name, field in Experiment.model_fields.items():
        section = field.annotation
        yield Key(name, name, {"": Experiment})
        if isinstance(section, type) and issubclass(section, Option):
            every = [*section.kinds, *shipped.own_kinds(name)] if config is None else [value_at(config, f"{name}.kind")]
            owners: dict[str, type[Section]] = {}
            for kind in every:
                with suppress(PydanticCustomError):
                    owners[kind] = section.resolve(kind)
            yield from keys_of(name, owners)
        elif isinstance(section, type) and issubclass(section, Section):
            yield from keys_of(name, {"": section})


def lacks(values: Mapping[str, Any], path: str) -> bool:
    """Return whether a key is missing from nested mappings although its parent mapping exists."""
    return value_at(values, path) is ... and isinstance(value_at(values, path.rpartition(".")[0]), dict)


def keys_of(prefix: str, owners: Mapping[str, type[Section]]) -> Iterator[Key]:
    """Yield the fields of the classes `owners` as keys `PREFIX.FIELD`, including the fields of nested sections."""
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


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the Section class in a field's annotation (None if there is none), and whether the field is a list of sections."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    for part in get_args(annotation):
        inner, listed = _section_in(part)
        if inner is not None:
            return inner, listed or get_origin(annotation) is list
    return None, False


def matching(word: str, keys: Iterable[Key]) -> list[Key]:
    """Return the key whose full name is `word`, or else all keys whose name ends with `word`: `lr` matches optimizer.lr."""
    found = [key for key in keys if f".{plain(key.name)}".endswith(f".{plain(word)}")]
    return [key for key in found if plain(key.name) == plain(word)] or found


def plain(name: str) -> str:
    """Strip list indices and a tracker's name from a key's name: `wrap.rules[0].match` becomes `wrap.rules.match`."""
    return MEMBER.sub("tracker", INDEX.sub("", name))


def in_words(schema: dict[str, Any], definitions: dict[str, Any], *, whole: bool = False) -> str:
    """Describe the values that a JSON schema accepts, such as `text or null`. With `whole`, list all names, however many."""
    parts = list(dict.fromkeys(_kinds_of_value(schema, definitions, whole)))
    if "text" in parts:  # text includes numbers and names
        parts = [part for part in parts if part in ("text", "null")]
    *others, last = sorted(parts, key="null".__eq__)
    return f"{', '.join(others)}{', or' if ' ' in others[-1] else ' or'} {last}" if others else last


def _kinds_of_value(schema: dict[str, Any], definitions: dict[str, Any], whole: bool) -> list[str]:
    if "$ref" in schema:
        return _kinds_of_value(definitions[schema["$ref"].rpartition("/")[2]], definitions, whole)
    if "anyOf" in schema:
        return [part for each in schema["anyOf"] for part in _kinds_of_value(each, definitions, whole)]
    if "const" in schema or "enum" in schema:
        known = [in_yaml(each) for each in schema.get("enum", [schema.get("const")])]
        return known if whole or len(known) <= LONG else [f"one of {len(known)} names"]
    kind = schema.get("type", "")
    if kind == "boolean":
        return ["true", "false"]
    if kind == "array":
        if fixed := schema.get("prefixItems"):
            return [f"list of {len(fixed)}: {in_words(fixed[0], definitions)}"]
        return [f"list of: {in_words(schema['items'], definitions)}" if schema.get("items") else "list"]
    if kind == "object" and schema.get("properties"):
        return [f"mapping of {', '.join(schema['properties'])}"]
    if kind == "object":
        values = schema.get("additionalProperties")
        return [f"mapping of names to {in_words(values, definitions)}" if isinstance(values, dict) else "mapping"]
    return [TYPES.get(kind, "anything") + _limits(schema)]


def _limits(schema: dict[str, Any]) -> str:
    """Return the limits of a number in words, such as ` from 1 to 1,024` or ` above 0`."""
    words = {"exclusiveMinimum": "above", "minimum": "at least", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = {word: schema[name] for name, word in words.items() if name in schema and schema[name] < HUGE}
    if {"at least", "at most"} <= limits.keys():
        return f" from {limits['at least']:,} to {limits['at most']:,}"
    return " " * bool(limits) + ", ".join(f"{word} {limit:,}" for word, limit in limits.items())


def in_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {in_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value)

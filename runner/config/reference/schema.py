"""The configuration as a JSON schema (draft 2020-12), for editors, and what it says of a value in words."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.json_schema import GenerateJsonSchema, JsonRef

from meshrunner.recipes.option import Option, Section
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.reference.docstrings import documentation

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core.core_schema import CoreSchema, ModelSchema

    CoreSchemaOrField = Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OWN_CLASS = r"^[\w.]+:[\w.]+$"
INTERPOLATION = {
    "type": "string",
    "pattern": r"\$\{|^\?\?\?$",
    "description": "An interpolation, or ??? for a missing value.",
}
HYDRA = {
    "type": "object",
    "description": "Hydra's own settings: run.dir, sweep.dir, mode, sweeper.params (the grid of a sweep), launcher.",
}
DEFAULTS = {"type": "array", "description": "Hydra's defaults list: options and files that this one builds on."}
PLAIN = re.compile(r"[\w$(/.\\<~][^#]*(?<![:\s])")
"""Text that needs no quotes."""
HUGE = 2**62
"""Limits from here on concern nobody."""
LONG = 12
"""Names that are listed in a sentence; of more, only the number."""


def configuration_schema() -> dict[str, Any]:
    """The schema of a run directory's config.yaml: everything is there, and resolved."""
    return _Generator.of(Experiment)


def experiment_schema() -> dict[str, Any]:
    """The schema of a file in conf/experiment: any part of a configuration."""
    return _WrittenGenerator.of(Experiment, hydra=HYDRA)


def option_schema(section: type[Section], **more: dict[str, Any]) -> dict[str, Any]:
    """The schema of an option's file. section: the base class of the group; more: properties that the class does not have."""
    return _WrittenGenerator.of(section, **more)


@cache
def section_schema(section: type[Section]) -> dict[str, Any]:
    """The schema of the keys of one class; of groups in it only that they are mappings."""
    return _SectionGenerator.of(section)


def is_group(section: type) -> bool:
    """Whether a class is the base class of a group."""
    return issubclass(section, Option) and "kinds" in vars(section)


class _Generator(GenerateJsonSchema):
    """pydantic's, with the docstrings of fields; of a group it is the schema of the class that `kind` names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.begun: set[type] = set()

    @classmethod
    def of(cls, section: type[Section], **more: dict[str, Any]) -> dict[str, Any]:
        """The schema of a section. more: further properties."""
        section.model_rebuild()
        generator = cls()
        found = generator.generate(section.__pydantic_core_schema__)
        if more:
            found.setdefault("properties", {}).update(more)
        return {"$schema": DIALECT, **found}

    def field_title_should_be_set(self, schema: CoreSchemaOrField) -> bool:
        return False  # the key again, with a capital letter

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        section = schema["cls"]
        if is_group(section) and section not in self.begun:
            self.begun.add(section)
            return self._group(section)
        found = super().model_schema(schema)
        for name, text in documentation(section).items():
            if name in found.get("properties", {}):
                found["properties"][name]["description"] = text
        return found

    def _group(self, base: type[Option]) -> JsonSchemaValue:
        """`if kind is ... then`, not `oneOf`: an editor then says which key is wrong, not that no option fits."""
        options = {kind: self._reference(base.resolve(kind)) for kind in sorted(base.kinds)}
        own = {"type": "string", "pattern": OWN_CLASS, "description": "Your own class: package.module:Class."}
        kind = {"description": documentation(base)["kind"], "anyOf": [{"enum": list(options)}, own]}
        chosen = [
            {"if": {"properties": {"kind": {"const": name}}, "required": ["kind"]}, "then": option}
            for name, option in options.items()
        ]
        return self._choice(base, {"type": "object", "properties": {"kind": kind}}, chosen, options)

    def _choice(
        self, base: type[Option], found: JsonSchemaValue, chosen: list[Any], options: dict[str, JsonSchemaValue]
    ) -> JsonSchemaValue:
        return found | {"required": ["kind"], "allOf": chosen}

    def _reference(self, option: type[Section]) -> JsonSchemaValue:
        option.model_rebuild()
        core: CoreSchema = option.__pydantic_core_schema__
        return self.generate_inner(core)


class _SectionGenerator(_Generator):
    """Of one class, without the options of groups, whose modules are then not imported."""

    def _group(self, base: type[Option]) -> JsonSchemaValue:
        return {"type": "object"}


class _WrittenGenerator(_Generator):
    """Of files that people write: keys may be left out or be interpolations, and a defaults list says what they build on."""

    @classmethod
    def of(cls, section: type[Section], **more: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = _named(super().of(section, **more), INTERPOLATION, "Interpolation")
        return found | {"$defs": found.get("$defs", {}) | {"Interpolation": INTERPOLATION}}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        found.pop("required", None)
        section = schema["cls"]
        properties = found.get("properties", {})
        if not is_group(section):
            for name, each in properties.items():
                properties[name] = _or_interpolation(each)
        if issubclass(section, Option | Experiment):
            properties["defaults"] = DEFAULTS
        return found

    def _choice(
        self, base: type[Option], found: JsonSchemaValue, chosen: list[Any], options: dict[str, JsonSchemaValue]
    ) -> JsonSchemaValue:
        """Without `kind`, which the file may inherit, the keys of all kinds."""
        known: dict[str, list[JsonSchemaValue]] = {}
        for reference in options.values():
            option = self.get_schema_from_definitions(JsonRef(reference["$ref"])) or {}
            for name, each in option.get("properties", {}).items():
                if each not in known.setdefault(name, []):
                    known[name].append(each)
        properties = {name: each[0] if len(each) == 1 else {"anyOf": each} for name, each in known.items()}
        inherited = {"properties": properties, "additionalProperties": False}
        return found | {"if": {"required": ["kind"]}, "then": {"allOf": chosen}, "else": inherited}


def _or_interpolation(schema: JsonSchemaValue) -> JsonSchemaValue:
    if schema == DEFAULTS or any(
        set(each) <= {"type", "description"} and each.get("type") == "string"
        for each in (schema, *schema.get("anyOf", ()))
    ):
        return schema
    described = {key: schema[key] for key in ("description", "default") if key in schema}
    return described | {"anyOf": [{key: each for key, each in schema.items() if key not in described}, INTERPOLATION]}


def _named(schema: Any, part: dict[str, Any], name: str) -> Any:
    """A schema with references to a definition in the place of a part."""
    if schema == part:
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(schema, dict):
        return {key: _named(value, part, name) for key, value in schema.items()}
    return [_named(each, part, name) for each in schema] if isinstance(schema, list) else schema


class Words:
    """What a schema expects of a value, in words: `number above 0`, `whole number at least 1, or auto`."""

    names: ClassVar[dict[str, str]] = {
        "null": "null",
        "string": "text",
        "integer": "whole number",
        "number": "number",
    }

    def __init__(self, definitions: dict[str, Any]) -> None:
        self.definitions = definitions

    def of(self, schema: dict[str, Any], *, whole: bool = False) -> str:
        """The words. whole: all names there are to choose from, however many."""
        parts = list(dict.fromkeys(self._parts(schema, whole)))
        if "text" in parts:  # a number is as good as text where both are taken
            parts = [part for part in parts if part in ("text", "null")]
        *others, last = sorted(parts, key="null".__eq__)
        return f"{', '.join(others)}{', or' if ' ' in others[-1] else ' or'} {last}" if others else last

    def _parts(self, schema: dict[str, Any], whole: bool) -> list[str]:
        """One text for each kind of value."""
        if "$ref" in schema:
            return self._parts(self.definitions[schema["$ref"].rpartition("/")[2]], whole)
        if "anyOf" in schema:
            return [part for each in schema["anyOf"] for part in self._parts(each, whole)]
        if "const" in schema or "enum" in schema:
            known = [in_yaml(each) for each in schema.get("enum", [schema.get("const")])]
            return known if whole or len(known) <= LONG else [f"one of {len(known)} names"]
        kind = schema.get("type", "")
        if kind == "boolean":
            return ["true", "false"]
        if kind == "array":
            return [self._list(schema)]
        if kind == "object":
            return [self._mapping(schema)]
        return [self.names.get(kind, "anything") + _limits(schema)]

    def _list(self, schema: dict[str, Any]) -> str:
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}: {self.of(schema['prefixItems'][0])}"
        return f"list of: {self.of(schema['items'])}" if schema.get("items") else "list"

    def _mapping(self, schema: dict[str, Any]) -> str:
        if schema.get("properties"):
            return f"mapping of {', '.join(schema['properties'])}"
        values = schema.get("additionalProperties")
        return f"mapping of names to {self.of(values)}" if isinstance(values, dict) else "mapping"


def _limits(schema: dict[str, Any]) -> str:
    """` from 1 to 1,024`, ` above 0`."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if high is not None and high >= HUGE:
        high = None
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    limits = {"above": above, "at least": low, "at most": high, "below": below}
    found = [f"{word} {limit:,}" for word, limit in limits.items() if limit is not None]
    return f" {', '.join(found)}" if found else ""


def in_yaml(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {in_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value)

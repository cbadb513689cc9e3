"""JSON schemas (draft 2020-12) of configurations and of the files in conf/, for editors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

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


def configuration_schema() -> dict[str, Any]:
    """Return the schema of a run directory's config.yaml, in which every key is present and resolved."""
    return _Generator.of(Experiment)


def experiment_schema() -> dict[str, Any]:
    """Return the schema of a file in conf/experiment, which may hold any part of a configuration."""
    return _WrittenGenerator.of(Experiment, hydra=HYDRA)


def option_schema(section: type[Section], **more: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an option's file, given the base class of its group. more: properties that the class lacks."""
    return _WrittenGenerator.of(section, **more)


@cache
def section_schema(section: type[Section]) -> dict[str, Any]:
    """Return the schema of the keys of one class, in which groups are just mappings."""
    return _SectionGenerator.of(section)


def is_group(section: type) -> bool:
    """Return whether a class is the base class of a group."""
    return issubclass(section, Option) and "kinds" in vars(section)


class _Generator(GenerateJsonSchema):
    """pydantic's generator, extended by docstrings of fields. A group has the schema of the class that `kind` names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.begun: set[type] = set()

    @classmethod
    def of(cls, section: type[Section], **more: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of a section. more: further properties."""
        section.model_rebuild()
        generator = cls()
        found = generator.generate(section.__pydantic_core_schema__)
        if more:
            found.setdefault("properties", {}).update(more)
        return {"$schema": DIALECT, **found}

    def field_title_should_be_set(self, schema: CoreSchemaOrField) -> bool:
        return False  # a title would repeat the key with a capital letter

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
        """Return a schema with `if kind is ... then` rather than `oneOf`, so that editors name the wrong key."""
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
    """Generates the schema of one class without the options of groups, whose modules are then not imported."""

    def _group(self, base: type[Option]) -> JsonSchemaValue:
        return {"type": "object"}


class _WrittenGenerator(_Generator):
    """Generates the schema of files that people write: keys are optional, may be interpolations, and `defaults` is allowed."""

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
        """Also accept a file without `kind`, which it may inherit, with the keys of all kinds."""
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
    """Return a schema with every occurrence of `part` replaced by a reference to the definition `name`."""
    if schema == part:
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(schema, dict):
        return {key: _named(value, part, name) for key, value in schema.items()}
    return [_named(each, part, name) for each in schema] if isinstance(schema, list) else schema

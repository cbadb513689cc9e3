"""Build JSON schemas (draft 2020-12) of configurations and of the files in conf/, with field docstrings as descriptions."""

import ast
import inspect
import sys
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from meshrunner.recipes.option import Option, Section

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
DEFAULTS = {"type": "array", "description": "Hydra's defaults list: options and files that this file builds on."}


def resolved_schema(section: type[Section]) -> dict[str, Any]:
    """Return the JSON schema of a resolved configuration, in which every key has a value. The schema requires every key."""
    return {"$schema": DIALECT, **_Generator().of(section)}


def file_schema(section: type[Section], **more: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a YAML file that sets a section's keys. `more` adds keys that the section's class lacks."""
    found = _written(_Generator().of(section))
    found.setdefault("properties", {}).update(more)
    found["$defs"] = found.get("$defs", {}) | {"Interpolation": INTERPOLATION}
    return {"$schema": DIALECT, **found}


@cache
def section_schema(section: type[Section]) -> dict[str, Any]:
    """Return the JSON schema of one section. Groups in the section accept any mapping, so that no option class is imported."""
    return _Generator(with_options=False).of(section)


def is_group(section: type) -> bool:
    """Return whether a class is the base class of a group."""
    return issubclass(section, Option) and "kinds" in vars(section)


class _Generator(GenerateJsonSchema):
    """A pydantic schema generator that adds field docstrings and makes the keys of a group depend on the value of `kind`."""

    def __init__(self, *, with_options: bool = True) -> None:
        super().__init__()
        self.with_options = with_options
        self.begun: set[type] = set()

    def of(self, section: type[Section]) -> dict[str, Any]:
        section.model_rebuild()
        return self.generate(section.__pydantic_core_schema__)

    def field_title_should_be_set(self, schema: Any) -> bool:
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
        """Return a group's schema. Use `if`/`then` instead of `oneOf`, so that editors can report which key is wrong."""
        if not self.with_options:
            return {"type": "object"}
        chosen = []
        for name in sorted(base.kinds):
            option = base.resolve(name)
            option.model_rebuild()
            condition = {"properties": {"kind": {"const": name}}, "required": ["kind"]}
            chosen.append({"if": condition, "then": self.generate_inner(option.__pydantic_core_schema__)})
        own = {"type": "string", "pattern": OWN_CLASS, "description": "Your own class: package.module:Class."}
        kind = {"description": documentation(base)["kind"], "anyOf": [{"enum": sorted(base.kinds)}, own]}
        return {"type": "object", "properties": {"kind": kind}, "required": ["kind"], "allOf": chosen}


def _written(schema: Any) -> Any:
    """Relax a schema for hand-written files: make keys optional, allow interpolations as values, and add a key `defaults`."""
    if isinstance(schema, list):
        return [_written(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: each if key == "if" else _written(each) for key, each in schema.items() if key != "required"}
    properties = found.get("properties", {})
    if "kind" in properties:
        properties["defaults"] = DEFAULTS
    if "allOf" in found:  # a group: the file of an option may inherit `kind`
        chosen = found.pop("allOf")
        options = {"anyOf": [each["then"] for each in chosen]}
        return found | {"if": {"required": ["kind"]}, "then": {"allOf": chosen}, "else": options}
    for name, each in properties.items():
        described = {"description": each.pop("description")} if "description" in each else {}
        properties[name] = described | {"anyOf": [each, {"$ref": "#/$defs/Interpolation"}]}
    return found


def documentation(section: type[Section]) -> dict[str, str]:
    """Return the docstrings of a class's own and inherited fields, keyed by field. Each docstring is one line."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            found |= _docstrings(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # the class was not imported from a file
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id: " ".join(below.value.value.split())
                for field, below in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(below.value.value, str)
            }
    return found

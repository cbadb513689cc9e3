"""The values that a JSON schema accepts, in words: `number above 0`, `whole number at least 1, or auto`."""

from __future__ import annotations

import json
import re
from typing import Any

TYPES = {"null": "null", "string": "text", "integer": "whole number", "number": "number"}
PLAIN = re.compile(r"[\w$(/.\\<~][^#]*(?<![:\s])")
"""Text that needs no quotes in YAML."""
HUGE = 2**62
"""Upper limits from here on exist only for technical reasons and are not mentioned."""
LONG = 12
"""Most names to list; of more, only their number is shown."""


class Expected:
    """Describes the values that a JSON schema accepts, with definitions that several schemas share."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self.definitions = definitions

    def words(self, schema: dict[str, Any], *, whole: bool = False) -> str:
        """Describe the values that a schema accepts. whole: list all names to choose from, however many."""
        parts = list(dict.fromkeys(self._parts(schema, whole)))
        if "text" in parts:  # text includes numbers and names
            parts = [part for part in parts if part in ("text", "null")]
        *others, last = sorted(parts, key="null".__eq__)
        return f"{', '.join(others)}{', or' if ' ' in others[-1] else ' or'} {last}" if others else last

    def _parts(self, schema: dict[str, Any], whole: bool) -> list[str]:
        """Return a text for each type of value."""
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
        return [TYPES.get(kind, "anything") + _limits(schema)]

    def _list(self, schema: dict[str, Any]) -> str:
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}: {self.words(schema['prefixItems'][0])}"
        return f"list of: {self.words(schema['items'])}" if schema.get("items") else "list"

    def _mapping(self, schema: dict[str, Any]) -> str:
        if schema.get("properties"):
            return f"mapping of {', '.join(schema['properties'])}"
        values = schema.get("additionalProperties")
        return f"mapping of names to {self.words(values)}" if isinstance(values, dict) else "mapping"


def _limits(schema: dict[str, Any]) -> str:
    """Return the limits of a number: ` from 1 to 1,024`, ` above 0`."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high >= HUGE:
        high = None
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    limits = {"above": above, "at least": low, "at most": high, "below": below}
    found = [f"{word} {limit:,}" for word, limit in limits.items() if limit is not None]
    return f" {', '.join(found)}" if found else ""


def in_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {in_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value)

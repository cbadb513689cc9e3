"""Flat configurations, and the differences between two configurations."""

from __future__ import annotations

from typing import Any


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration with dotted keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def same_value(one: Any, other: Any) -> bool:
    """Return whether two settings are equal: 1 equals 1.0, but neither true nor '1'."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) of every key that differs. The value of a missing key is `...`."""
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{path}." if path else ""
        deeper = [differences(old.get(key, ...), new.get(key, ...), f"{prefix}{key}") for key in old | new]
        return [each for found in deeper for each in found]
    return [] if old == new else [(path, old, new)]

"""`sweep.exclude`: rules for combinations of a sweep to skip.

A rule is a line of conditions, `activation_checkpoint=full micro_batch=8,16`, which matches where all of them hold. A
condition names a group and some of its options, or a key and some of its values.
"""

from __future__ import annotations

from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner.config.compose import Composed


def matching_rule(rules: list[str], composed: Composed) -> str | None:
    """
    The first rule that matches a combination; None when there is none.

    Raises:
        ConfigError: a rule is not a line of conditions, or names no key.
    """
    return next((rule for rule in rules if all(_holds(condition, composed) for condition in _conditions(rule))), None)


def _conditions(rule: str) -> list[tuple[str, list[str]]]:
    conditions = [word.partition("=") for word in rule.split()]
    if not conditions or not all(key and equals and values for key, equals, values in conditions):
        raise ConfigError(
            f"sweep.exclude: '{rule}' is not a line of conditions; expected e.g. activation_checkpoint=full micro_batch=8,16"
        )
    return [(key, values.split(",")) for key, _, values in conditions]


def _holds(condition: tuple[str, list[str]], composed: Composed) -> bool:
    key, values = condition
    chosen = composed.overrides["choices"].get(key)
    if chosen is not None:
        return str(chosen) in values
    here: Any = composed.config
    for depth, part in enumerate(key.split(".")):
        if not isinstance(here, dict) or part not in here:
            if depth == 0:
                raise ConfigError(f"sweep.exclude: there is no key '{key}'.{did_you_mean(part, composed.config)}")
            return False  # a key of another option
        here = here[part]
    return _text(here) in values


def _text(value: Any) -> str:
    """A value as typed on the command line."""
    if isinstance(value, float):
        return f"{value:g}"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))

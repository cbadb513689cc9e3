"""`sweep.exclude`: rules for the combinations that a sweep skips.

For example, the rule `activation_checkpoint=full micro_batch=8,16` skips combinations with full activation checkpointing and a
micro batch of 8 or 16. The rule's two conditions must both match. A condition names a group and options, or a key and values.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, OverrideType, Sweep
from hydra.errors import HydraException

from meshrunner.recipes.config_keys import flatten, same_value, value_at
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner.config.compose import Composed
from meshrunner.runner.config.hydra.overrides import split_outside


class ExcludeCondition(NamedTuple):
    """A condition such as `micro_batch=8,16`: a key and the values that match, or a group and the options that match."""

    key: str
    values: dict[str, Any]
    """Parsed values or options, keyed by their text in the rule: {'8': 8, '16': 16}."""

    def matches(self, composed: Composed) -> bool:
        choices = composed.overrides["choices"]
        if self.key in choices:
            return any(choices[self.key] in (text, value) for text, value in self.values.items())
        here = value_at(composed.config, self.key)
        return any(same_value(value, here) for value in self.values.values())


def matching_rule(rules: list[str], composed: Composed) -> str | None:
    """Return the first rule that matches a combination, or None if no rule matches. Raise ConfigError if a rule is invalid."""
    return next((rule for rule in rules if all(each.matches(composed) for each in conditions(rule))), None)


def check_rules(rules: Iterable[str], combinations: Sequence[Composed], options: Callable[[str], list[str]]) -> None:
    """Raise ConfigError if a rule names an unknown key, or an option that is not among `options(group)`."""
    for rule in rules:
        for key, values in conditions(rule):
            if any(key in each.overrides["choices"] for each in combinations):
                known = options(key)
                # `known` lacks the options in subdirectories, so options with a slash are not checked.
                for option in (value if isinstance(value, str) else text for text, value in values.items()):
                    if option not in [*known, "null"] and "/" not in option:
                        raise ConfigError(
                            f"sweep.exclude: '{rule}': {key} has no option '{option}'.{did_you_mean(option, known)} "
                            f"Known: {', '.join(sorted(known))}"
                        )
            elif key not in (known := sorted({name for each in combinations for name in flatten(each.config)})):
                hint = did_you_mean(key, [*known, *combinations[0].overrides["choices"]])
                raise ConfigError(f"sweep.exclude: '{rule}': no combination of this sweep has a key '{key}'.{hint}")


@lru_cache(maxsize=1000)
def conditions(rule: str) -> tuple[ExcludeCondition, ...]:
    """Return the conditions of a rule. Raise ConfigError if a condition is invalid."""
    try:
        found = tuple(_condition(word) for word in split_outside(rule, " \t\n") if word)
    except (HydraException, ValueError, RecursionError):
        found = ()
    if not found:
        raise ConfigError(
            f"sweep.exclude: '{rule}': expected conditions, for example activation_checkpoint=full micro_batch=8,16"
        )
    return found


def _condition(word: str) -> ExcludeCondition:
    key, _, values = word.partition("=")
    typed: dict[str, Any] = {}
    for text in split_outside(values, ","):
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
        value = parsed.value()
        if parsed.type is not OverrideType.CHANGE or not key or not text or isinstance(value, Sweep | Glob):
            raise ValueError(word)
        typed[text] = value
    return ExcludeCondition(key, typed)

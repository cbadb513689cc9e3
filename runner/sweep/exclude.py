"""`sweep.exclude`: rules for combinations of a sweep to skip.

A rule is a line of conditions such as `activation_checkpoint=full micro_batch=8,16`. It matches a combination if all of its
conditions do. Each names a group and some of its options, or a key and some of its values, typed as on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, OverrideType, Sweep
from hydra.errors import HydraException

from meshrunner.recipes.config_diff import same_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner.config.compose import Composed
from meshrunner.runner.config.hydra.overrides import split_outside


class ExcludeCondition(NamedTuple):
    """`micro_batch=8,16`: a key and the values that match, or a group and the options that match."""

    key: str
    values: dict[str, Any]
    """Text as typed -> value as YAML reads it."""

    def matches(self, composed: Composed) -> bool:
        """Return whether a combination has one of the values."""
        return any(_has(self.key, text, value, composed) for text, value in self.values.items())


def matching_rule(rules: list[str], composed: Composed) -> str | None:
    """
    Return the first rule that matches a combination, or None.

    Raises:
        ConfigError: a rule has no valid conditions.
    """
    return next((rule for rule in rules if _matches(rule, composed)), None)


def check_rules(
    rules: Sequence[str], combinations: Sequence[Composed], options: Callable[[str], list[str]], *, whole_sweep: bool
) -> list[str]:
    """
    Check that rules can match a combination.

    Args:
        options: returns the names of a group's options.
        whole_sweep: whether `combinations` is the whole sweep, so that no other batch follows.

    Returns:
        A warning for each rule that matches none of the combinations of a whole sweep.

    Raises:
        ConfigError: a rule names an option that its group does not have, or a key that no combination has.
    """
    warnings = []
    for rule in rules:
        missing = []
        for condition in conditions(rule):
            _check_key(rule, condition, combinations, options, whole_sweep)
            missing += [
                f"{condition.key}={text}"
                for text, value in condition.values.items()
                if not any(_has(condition.key, text, value, each) for each in combinations)
            ]
        if whole_sweep and missing:
            warnings.append(f"sweep.exclude: '{rule}': no combination of this sweep has {' or '.join(missing)}")
        elif whole_sweep and not any(_matches(rule, each) for each in combinations):
            warnings.append(f"sweep.exclude: '{rule}' matches no combination of this sweep")
    return warnings


def _check_key(
    rule: str,
    condition: ExcludeCondition,
    combinations: Sequence[Composed],
    options: Callable[[str], list[str]],
    whole_sweep: bool,
) -> None:
    key = condition.key
    if any(key in each.overrides["choices"] for each in combinations):
        known = options(key)
        # The names do not include options in subdirectories.
        for option in (value if isinstance(value, str) else text for text, value in condition.values.items()):
            if option not in [*known, "null"] and "/" not in option:
                raise ConfigError(
                    f"sweep.exclude: '{rule}': {key} has no option '{option}'.{did_you_mean(option, known)} "
                    f"Known: {', '.join(sorted(known))}"
                )
        return
    known = sorted({name for each in combinations for name in _keys(each.config)})
    # A later combination may have another option of the group, with other keys.
    if key not in known and (whole_sweep or key.partition(".")[0] not in known):
        hint = did_you_mean(key, [*known, *combinations[0].overrides["choices"]])
        raise ConfigError(f"sweep.exclude: '{rule}': no combination of this sweep has a key '{key}'.{hint}")


@lru_cache(maxsize=1000)
def conditions(rule: str) -> tuple[ExcludeCondition, ...]:
    """Return the conditions of a rule; raises ConfigError if one is invalid."""
    try:
        found = tuple(_condition(word) for word in split_outside(rule, " \t\n") if word)
    except (HydraException, ValueError, RecursionError):
        found = ()
    if not found:
        raise ConfigError(
            f"sweep.exclude: '{rule}' is not a line of conditions. Write for example activation_checkpoint=full micro_batch=8,16"
        )
    return found


def _condition(word: str) -> ExcludeCondition:
    """Parse one condition; raises ValueError or HydraException if it is invalid."""
    key, _, values = word.partition("=")
    typed: dict[str, Any] = {}
    for text in split_outside(values, ","):
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
        value = parsed.value()
        if parsed.type is not OverrideType.CHANGE or not key or not text or isinstance(value, Sweep | Glob):
            raise ValueError(word)
        typed[text] = value
    return ExcludeCondition(key, typed)


def _matches(rule: str, composed: Composed) -> bool:
    return all(condition.matches(composed) for condition in conditions(rule))


def _has(key: str, text: str, value: Any, composed: Composed) -> bool:
    """Return whether a combination has an option of a group or a value of a key."""
    if key in composed.overrides["choices"]:
        return composed.overrides["choices"][key] in (text, value)
    here: Any = composed.config
    for part in key.split("."):
        here = here.get(part, ...) if isinstance(here, dict) else ...
    return same_value(value, here)


def _keys(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration at every depth: `parallelism`, `parallelism.shard`."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")

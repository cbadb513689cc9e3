"""Choose and sort the rows of a comparison: `--where parallelism=fsdp2`, `--sort mfu`, `--top 10`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from meshrunner.recipes.config_diff import flatten, same_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner.compare.keys import first_of, text
from meshrunner.runner.figures import FIGURES, PREDICTION, higher_is_better, number
from meshrunner.runner.rundir import parse_yaml

if TYPE_CHECKING:
    from meshrunner.runner.compare.comparison import Comparison, Row

CONDITION = re.compile(r"\s*(?P<key>[^\s=<>!]+)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?P<value>.*\S)\s*", re.DOTALL)
ORDERS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}
NOTHING = (2, 0.0, "")
"""Sort key of a missing value."""
LISTED = 12
"""Largest number of names that a message lists."""

T = TypeVar("T")


class Field(NamedTuple, Generic[T]):
    """A property by which things are chosen and sorted: a setting, the state, a figure."""

    values: Callable[[T], Sequence[Any]]
    """Function that returns the values of a thing; several, if the thing is a row of several runs."""
    open: bool = False
    """Whether a condition may name a value that nothing has."""
    better: str = ""
    """`high` or `low` for a figure: the values that come first; "" for other fields."""
    constant: bool = False
    """Whether other fields take precedence for a short name."""


class Filter(NamedTuple):
    """A condition of `--where`, such as `parallelism=fsdp2,ddp` or `wps>5000`."""

    text: str
    key: str
    operator: str
    given: tuple[Any, ...]
    """The values to compare with; one for an order, several alternatives for = and !=."""

    def holds(self, values: Sequence[Any]) -> bool:
        """Return whether any of some values meets the condition; for `!=`, whether all do."""
        if self.operator in ORDERS:
            numbers = [found for value in values if (found := number(value)) is not None]
            return any(ORDERS[self.operator](found, self.given[0]) for found in numbers)
        return any(_is(value, given) for value in values for given in self.given) == (self.operator == "=")


def _is(value: Any, given: Any) -> bool:
    """Return whether a value equals a typed one: 0.001 equals 1e-3, and `null` both null and an option of that name."""
    return same_value(value, given) or (isinstance(value, str) and value == text(given))


def parsed(typed: str) -> Filter:
    """Parse a condition of `--where`; raise ConfigError if it is not one."""
    found = CONDITION.fullmatch(typed)
    if found is None:
        raise ConfigError(f"--where: expected KEY=VALUE, KEY!=VALUE or KEY>NUMBER, for example wps>5000, got '{typed}'")
    key, operator, value = found["key"], found["operator"], found["value"]
    try:
        given = parse_yaml(f"[{value}]")
    except ValueError:
        given = [value]
    if operator in ORDERS and (len(given) != 1 or number(given[0]) is None):
        raise ConfigError(f"--where: '{typed}': expected a number, got '{value}'")
    return Filter(typed.strip(), key, operator, tuple(given))


def named(name: str, fields: Mapping[str, Field[T]], option: str) -> str:
    """
    Return the full name of a field, given its full name or its last part.

    Args:
        option: beginning of error messages.

    Raises:
        ConfigError: no field has that name, or several fields do.
    """
    if name in fields:
        return name
    found = [each for each in fields if last_part(each) == name]
    found = [each for each in found if not fields[each].constant] or found
    found = [
        each for each in found if not each.startswith(PREDICTION)
    ] or found  # a short name means the measured figure
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{option}: '{name}' is ambiguous: {first_of(found, LISTED)}. Use a full name")
    known = list(dict.fromkeys([*map(last_part, fields), *fields]))
    listed = [last_part(each) for each, field in fields.items() if not field.constant]
    raise ConfigError(
        f"{option}: there is no key '{name}'.{did_you_mean(name, known)} Known: {first_of(listed, LISTED)}"
    )


def last_part(name: str) -> str:
    """Return the last part of a name: `lr` for `optimizer.lr`, `wps` for `perf/wps`."""
    return re.split(r"[./]", name)[-1]


def meeting(things: Iterable[T], where: Sequence[str], fields: Mapping[str, Field[T]]) -> list[T]:
    """
    Return the things that meet all conditions, in the same order.

    Raises:
        ConfigError: a condition cannot be parsed, or names an unknown field or a value that nothing has.
    """
    found = list(things)
    everything = list(found)
    for typed in where:
        wanted = parsed(typed)
        field = fields[named(wanted.key, fields, "--where")]
        if not field.open:
            _check_values(wanted, [value for each in everything for value in field.values(each)])
        found = [each for each in found if wanted.holds(field.values(each))]
    return found


def _check_values(wanted: Filter, values: Sequence[Any]) -> None:
    known = list(dict.fromkeys(map(text, values)))
    if wanted.operator in ORDERS:
        if all(number(value) is None for value in values):
            raise ConfigError(f"--where: '{wanted.text}': {wanted.key} is not a number: {first_of(known, LISTED)}")
        return
    for given in wanted.given:
        if not any(_is(value, given) for value in values):
            raise ConfigError(
                f"--where: nothing has {wanted.key}={text(given)}.{did_you_mean(text(given), known)} "
                f"Known: {first_of(known, LISTED)}"
            )


def ordered(things: Iterable[T], by: str, fields: Mapping[str, Field[T]], option: str = "--sort") -> list[T]:
    """
    Return things sorted by a field, best or smallest first; in reverse if its name begins with a minus.

    Things without a value are always last. Raises ConfigError if there is no such field.
    """
    field = fields[named(by.removeprefix("-"), fields, option)]
    backwards = by.startswith("-") != (field.better == "high")
    placed = [(min(map(_place, field.values(each)), default=NOTHING), each) for each in things]
    known = sorted((pair for pair in placed if pair[0] < NOTHING), key=lambda pair: pair[0], reverse=backwards)
    return [each for _, each in known] + [each for place, each in placed if place == NOTHING]


def _place(value: Any) -> tuple[int, float, str]:
    """Return the sort key of a value: numbers come before text, missing values last."""
    if value is None:
        return NOTHING
    known = number(value)
    return (1, 0.0, text(value)) if known is None else (0, known, "")


def select(
    comparison: Comparison, where: Sequence[str] = (), sort: str | None = None, top: int | None = None
) -> Comparison:
    """
    Return a comparison of the chosen rows in the chosen order. Their comparisons with baselines do not change.

    Args:
        top: number of rows to keep: the first by `sort`, or the fastest.

    Raises:
        ConfigError: a condition, key or number is wrong, or no row meets the conditions.
    """
    fields, rows = _fields(comparison), comparison.rows
    if top is not None and top < 1:
        raise ConfigError(f"--top: expected a number of at least 1, got {top}")
    places = {id(row): i for i, row in enumerate(rows)}
    chosen = meeting(rows, where, fields)
    if not chosen:
        raise ConfigError(f"--where: none of the {len(rows)} rows meets {' and '.join(where)}")
    by = sort or (comparison.speed.key if top else None)
    if by is not None:
        chosen = ordered(chosen, by, fields)[:top]
    numbers = [places[id(row)] for row in chosen]
    chosen_by = [*where, *([f"the first {top} by {sort}" if sort else f"the {top} fastest"] if top else [])]
    return replace(
        comparison,
        rows=chosen,
        against=[comparison.against[i] for i in numbers],
        scaling=[comparison.scaling[i] for i in numbers],
        selection=f"{len(chosen)} of {len(rows)} rows ({', '.join(chosen_by)})" if chosen_by else comparison.selection,
    )


def _fields(comparison: Comparison) -> dict[str, Field[Row]]:
    """Return the fields by which rows are chosen and sorted."""
    rows = comparison.rows
    found: dict[str, Field[Row]] = {key: Field(_setting(key)) for key in comparison.keys}
    found["state"] = Field(lambda row: [run.state for run in row.runs], open=True)
    for figure in FIGURES:
        for key in figure.summary_keys if figure.over_repeats else ():
            field = Field(_figure(key), open=True, better="high" if higher_is_better(key) else "low")
            found |= {name: field for name in dict.fromkeys((figure.key, key)) if name not in found}
    if any(value is not None for value in comparison.scaling):
        scaling = dict(zip(map(id, rows), comparison.scaling, strict=True))
        found["scaling"] = Field(lambda row: [scaling[id(row)]], open=True, better="high")
    first = [row.runs[0] for row in rows]
    names = dict.fromkeys(name for run in first for name in (*run.choices, *flatten(run.config)))
    return found | {name: Field(_constant(name), constant=True) for name in names if name not in found}


def _setting(key: str) -> Callable[[Row], Sequence[Any]]:
    return lambda row: [row.values.get(key)]


def _constant(name: str) -> Callable[[Row], Sequence[Any]]:
    """Return the values of a setting that has no column."""
    return lambda row: [row.runs[0].choices.get(name, flatten(row.runs[0].config).get(name))]


def _figure(key: str) -> Callable[[Row], Sequence[Any]]:
    """Return the values of a figure, only for completed rows: the speed of a crashed run is not comparable."""
    return lambda row: [row.figures.get(key) if row.completed else None]

"""Which rows of a comparison are shown, and in which order: `--where parallelism=fsdp2`, `--sort mfu`, `--top 10`."""

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
    from meshrunner.runner.compare.rows import Comparison, Row

CONDITION = re.compile(r"\s*(?P<key>[^\s=<>!]+)\s*(?P<how>!=|<=|>=|=|<|>)\s*(?P<value>.*\S)\s*", re.DOTALL)
ORDERS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}
NOTHING = (2, 0.0, "")
"""Place of what has no value."""
LISTED = 12
"""Names that a message lists."""

T = TypeVar("T")


class Field(NamedTuple, Generic[T]):
    """Something that is known of the things in a list: a setting, the state, a figure."""

    values: Callable[[T], Sequence[Any]]
    """Of one of them; several, where it stands for several runs."""
    open: bool = False
    """Whether a value may be asked for that none of them has."""
    better: str = ""
    """`high` or `low`, of a figure: which values come first."""
    constant: bool = False
    """Whether its last part alone names it only where no other field has that."""


class Condition(NamedTuple):
    """`parallelism=fsdp2,ddp`, `wps>5000`: a key, how its value is compared, and with what."""

    text: str
    key: str
    how: str
    given: tuple[Any, ...]

    def holds(self, values: Sequence[Any]) -> bool:
        """Return whether one of some values meets it; for `!=`, whether none has the value."""
        if self.how in ORDERS:
            numbers = [found for value in values if (found := number(value)) is not None]
            return any(ORDERS[self.how](found, self.given[0]) for found in numbers)
        return any(_is(value, given) for value in values for given in self.given) == (self.how == "=")


def _is(value: Any, given: Any) -> bool:
    """Return whether a value is what somebody typed: 0.001 is 1e-3, and `null` is null and an option of that name."""
    return same_value(value, given) or (isinstance(value, str) and value == text(given))


def condition(typed: str) -> Condition:
    """Return a condition as typed; raises ConfigError if it is none."""
    found = CONDITION.fullmatch(typed)
    if found is None:
        raise ConfigError(f"--where: expected KEY=VALUE, KEY!=VALUE or KEY>NUMBER, for example wps>5000, got '{typed}'")
    key, how, value = found["key"], found["how"], found["value"]
    try:
        given = parse_yaml(f"[{value}]")
    except ValueError:
        given = [value]
    if how in ORDERS and (len(given) != 1 or number(given[0]) is None):
        raise ConfigError(f"--where: '{typed}': expected a number, got '{value}'")
    return Condition(typed.strip(), key, how, tuple(given))


def named(name: str, fields: Mapping[str, Field[T]], option: str) -> str:
    """
    Return the full name of a field, given that or its last part.

    Raises:
        ConfigError: there is none of that name, or several; `option` is what the message begins with.
    """
    if name in fields:
        return name
    found = [each for each in fields if last_part(each) == name]
    found = [each for each in found if not fields[each].constant] or found
    found = [each for each in found if not each.startswith(PREDICTION)] or found  # what was measured has the short name
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{option}: '{name}' may be any of {first_of(found, LISTED)}")
    known = list(dict.fromkeys([*map(last_part, fields), *fields]))
    listed = [last_part(each) for each, field in fields.items() if not field.constant]
    raise ConfigError(
        f"{option}: there is no key '{name}'.{did_you_mean(name, known)} Known: {first_of(listed, LISTED)}"
    )


def last_part(name: str) -> str:
    """`lr` of `optimizer.lr`, `wps` of `perf/wps`."""
    return re.split(r"[./]", name)[-1]


def meeting(things: Iterable[T], where: Sequence[str], fields: Mapping[str, Field[T]]) -> list[T]:
    """
    Return the things that meet all conditions, in their order.

    Raises:
        ConfigError: a condition is none, names no field, or a value that nothing has.
    """
    found = list(things)
    everything = list(found)
    for typed in where:
        wanted = condition(typed)
        field = fields[named(wanted.key, fields, "--where")]
        if not field.open:
            _check_values(wanted, [value for each in everything for value in field.values(each)])
        found = [each for each in found if wanted.holds(field.values(each))]
    return found


def _check_values(wanted: Condition, values: Sequence[Any]) -> None:
    known = list(dict.fromkeys(map(text, values)))
    if wanted.how in ORDERS:
        if all(number(value) is None for value in values):
            raise ConfigError(f"--where: '{wanted.text}': {wanted.key} is no number: {first_of(known, LISTED)}")
        return
    for given in wanted.given:
        if not any(_is(value, given) for value in values):
            raise ConfigError(
                f"--where: nothing has {wanted.key}={text(given)}.{did_you_mean(text(given), known)} "
                f"Known: {first_of(known, LISTED)}"
            )


def ordered(things: Iterable[T], by: str, fields: Mapping[str, Field[T]], option: str = "--sort") -> list[T]:
    """
    Things in the order of a field, best or smallest first; with a minus before its name the other way round.

    What has no value comes last in any case. Raises ConfigError where there is no such field.
    """
    field = fields[named(by.removeprefix("-"), fields, option)]
    backwards = by.startswith("-") != (field.better == "high")
    placed = [(min(map(_place, field.values(each)), default=NOTHING), each) for each in things]
    known = sorted((pair for pair in placed if pair[0] < NOTHING), key=lambda pair: pair[0], reverse=backwards)
    return [each for _, each in known] + [each for place, each in placed if place == NOTHING]


def _place(value: Any) -> tuple[int, float, str]:
    """Numbers before texts, and nothing last."""
    if value is None:
        return NOTHING
    known = number(value)
    return (1, 0.0, text(value)) if known is None else (0, known, "")


def select(
    comparison: Comparison, where: Sequence[str] = (), sort: str | None = None, top: int | None = None
) -> Comparison:
    """
    Return a comparison of some of the rows, in the order asked for. How they compare with their baselines stays as it is.

    Args:
        top: number of rows; where no order is asked for, the fastest.

    Raises:
        ConfigError: a condition, key or number that cannot be, or nothing that meets the conditions.
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
    how = [*where, *([f"the first {top} by {sort}" if sort else f"the {top} fastest"] if top else [])]
    return replace(
        comparison,
        rows=chosen,
        against=[comparison.against[i] for i in numbers],
        scaling=[comparison.scaling[i] for i in numbers],
        selection=f"{len(chosen)} of {len(rows)} rows ({', '.join(how)})" if how else comparison.selection,
    )


def _fields(comparison: Comparison) -> dict[str, Field[Row]]:
    """What rows can be chosen and ordered by; what varies first, because its last parts are looked for first."""
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
    """Return a setting that does not vary, or not in a way that has a column."""
    return lambda row: [row.runs[0].choices.get(name, flatten(row.runs[0].config).get(name))]


def _figure(key: str) -> Callable[[Row], Sequence[Any]]:
    """Of what completed: a run that broke off may have been the fastest till then."""
    return lambda row: [row.figures.get(key) if row.completed else None]

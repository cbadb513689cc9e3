"""Choose and sort the rows of a comparison (one per combination of settings): `--where parallelism=fsdp2 --sort mfu --top 10`."""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from meshrunner.recipes.config_keys import flatten, same_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner.compare.comparison import Comparison
from meshrunner.runner.compare.keys import first_of, text
from meshrunner.runner.figures import FIGURES, PREDICTION, higher_is_better, number
from meshrunner.runner.rundir import parse_yaml

CONDITION = re.compile(r"\s*(?P<key>[^\s=<>!]+)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?P<value>.*\S)\s*", re.DOTALL)
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LISTED = 12
"""Maximum number of names that a message lists."""


class Field(NamedTuple):
    """A property of rows that `--where` and `--sort` accept: a setting, the state, or a figure (a measured number)."""

    values: Sequence[Sequence[Any]]
    """One list of values per row. For the state, the list has an item for each run of the row; otherwise it has one item."""
    open: bool = False
    """Whether `--where` accepts a value that no row has, such as state=oom. If False, such a value raises an error."""
    higher_is_better: bool = False
    """Whether high values of a figure are better; False for a setting or the state."""
    constant: bool = False
    """Whether the setting has no column in the table. If several fields end in `lr`, `lr` means the field that has a column."""


class Filter(NamedTuple):
    """A condition of `--where`, such as `parallelism=fsdp2,ddp` or `wps>5000`."""

    text: str
    key: str
    operator: str
    given: Sequence[Any]
    """Values to compare with: one number for `<`, `<=`, `>` and `>=`, or one or more alternatives for `=` and `!=`."""

    def holds(self, values: Sequence[Any]) -> bool:
        """Return whether at least one of a row's `values` meets the condition. For `!=`, every value must meet it."""
        if order := ORDERS.get(self.operator):
            return any(order(found, self.given[0]) for value in values if (found := number(value)) is not None)
        return any(_is(value, given) for value in values for given in self.given) == (self.operator == "=")

    def check(self, values: Sequence[Any]) -> None:
        """Raise ConfigError if `values` lacks a value that the condition names, or no number for `<` or `>` to compare."""
        known = list(dict.fromkeys(map(text, values)))
        if self.operator in ORDERS:
            if all(number(value) is None for value in values):
                raise ConfigError(
                    f"--where: '{self.text}': {self.key} is never a number; its values: {first_of(known, LISTED)}"
                )
            return
        for given in self.given:
            if not any(_is(value, given) for value in values):
                raise ConfigError(
                    f"--where: no run has {self.key}={text(given)}.{did_you_mean(text(given), known)} "
                    f"Known: {first_of(known, LISTED)}"
                )


def _is(value: Any, given: Any) -> bool:
    """Return whether a row's value equals the value that the user typed. `1e-3` equals 0.001; `null` equals None and "null"."""
    return same_value(value, given) or (isinstance(value, str) and value == text(given))


def parsed(typed: str) -> Filter:
    """Parse a condition of `--where`; raise ConfigError if `typed` is not a condition."""
    found = CONDITION.fullmatch(typed)
    if found is None:
        raise ConfigError(f"--where: expected KEY=VALUE, KEY!=VALUE or KEY>NUMBER, for example wps>5000, got '{typed}'")
    key, sign, value = found.groups()
    try:
        given = parse_yaml(f"[{value}]")
    except ValueError:
        given = [value]
    if sign in ORDERS and (len(given) != 1 or number(given[0]) is None):
        raise ConfigError(f"--where: '{typed}': expected a number, got '{value}'")
    return Filter(typed.strip(), key, sign, given)


def named(name: str, fields: Mapping[str, Field], option: str) -> str:
    """Return the full name of a field. `name`: full name or its last part. Raise ConfigError if `name` is unknown or ambiguous.
    If several fields end in `name`, prefer a field that has a column in the table, and prefer measured to predicted figures."""
    if name in fields:
        return name

    def rank(each: str) -> tuple[bool, bool]:
        return fields[each].constant, each.startswith(PREDICTION)

    found = [each for each in fields if last_part(each) == name]
    found = [each for each in found if rank(each) == min(map(rank, found))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{option}: '{name}' is ambiguous: {first_of(found, LISTED)}. Use a full name")
    known = [*map(last_part, fields), *fields]
    listed = [last_part(each) for each, field in fields.items() if not field.constant]
    raise ConfigError(
        f"{option}: there is no key '{name}'.{did_you_mean(name, known)} Known: {first_of(listed, LISTED)}"
    )


def last_part(name: str) -> str:
    """Return the last part of a name: `lr` for `optimizer.lr`, `wps` for `perf/wps`."""
    return re.split(r"[./]", name)[-1]


def meeting(where: Sequence[str], fields: Mapping[str, Field], rows: int) -> list[int]:
    """Return the indices of the rows that meet all conditions; raise ConfigError if a condition is invalid."""
    found = list(range(rows))
    for wanted in map(parsed, where):
        field = fields[named(wanted.key, fields, "--where")]
        if not field.open:
            wanted.check(list(chain.from_iterable(field.values)))
        found = [i for i in found if wanted.holds(field.values[i])]
    return found


def ordered(rows: Iterable[int], by: str, fields: Mapping[str, Field]) -> list[int]:
    """Return the indices of rows, sorted by the field `by`. Figures start with the best value, other fields with the smallest. A
    minus sign before the name reverses the order. Rows without a value come last."""
    field = fields[named(by.removeprefix("-"), fields, "--sort")]

    def place(value: Any) -> tuple[bool, float, str]:
        known = number(value)
        return (True, 0.0, text(value)) if known is None else (False, known, "")

    places = {i: sorted(place(value) for value in field.values[i] if value is not None) for i in rows}
    backwards = by.startswith("-") != field.higher_is_better
    known = sorted((i for i in places if places[i]), key=lambda i: places[i][0], reverse=backwards)
    return known + [i for i in places if not places[i]]


def select(
    comparison: Comparison, where: Sequence[str] = (), sort: str | None = None, top: int | None = None
) -> Comparison:
    """Keep the rows that meet all conditions. Sort them by `sort` (by speed if only `top` is given), and keep the first `top`.
    Raise ConfigError if no row is left."""
    fields, rows = fields_of(comparison), comparison.rows
    check_top(top)
    chosen = meeting(where, fields, len(rows))
    if not chosen:
        raise ConfigError(f"--where: none of the {len(rows)} rows meets {' and '.join(where)}")
    if by := sort or (comparison.speed.key if top else None):
        chosen = ordered(chosen, by, fields)[:top]
    chosen_by = [*where, *([f"the first {top} by {sort}" if sort else f"the {top} fastest"] if top else [])]
    return replace(
        comparison,
        rows=[rows[i] for i in chosen],
        against=[comparison.against[i] for i in chosen],
        scaling=[comparison.scaling[i] for i in chosen],
        selection=f"{len(chosen)} of {len(rows)} rows ({', '.join(chosen_by)})" if chosen_by else comparison.selection,
    )


def check_top(top: int | None) -> None:
    if top is not None and top < 1:
        raise ConfigError(f"--top: expected a number of at least 1, got {top}")


def fields_of(comparison: Comparison) -> dict[str, Field]:
    """Return the properties of the rows of a comparison, keyed by full name."""
    rows = comparison.rows
    found = {key: Field([[row.values.get(key)] for row in rows]) for key in comparison.keys}
    found["state"] = Field([[run.state for run in row.runs] for row in rows], open=True)
    for figure in FIGURES:
        for key in figure.summary_keys if figure.over_repeats else ():
            # Rows without a completed run have no figures here: the speed of a crashed run is not comparable.
            values = [[row.figures.get(key) if row.completed else None] for row in rows]
            for name in (figure.key, key):
                found.setdefault(name, Field(values, open=True, higher_is_better=higher_is_better(key)))
    if any(value is not None for value in comparison.scaling):
        found["scaling"] = Field([[value] for value in comparison.scaling], open=True, higher_is_better=True)
    constants = [flatten(row.runs[0].config) | row.runs[0].choices for row in rows]
    for name in dict.fromkeys(chain.from_iterable(constants)):
        found.setdefault(name, Field([[each.get(name)] for each in constants], constant=True))
    return found

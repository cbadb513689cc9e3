"""Find the settings that rows without a result have in common: `activation_checkpoint=none with micro_batch >= 4`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshrunner.runner.compare.keys import text
from meshrunner.runner.figures import number

MAX_VALUES = 3
"""Largest number of values that a pattern lists."""
MAX_PARTS = 3
"""Largest number of groups that rows are divided into."""

Values = dict[str, Any]
"""The varying keys of a row."""


class _Pattern(NamedTuple):
    """A description of the values that some rows have for one key."""

    key: str
    values: frozenset[str]
    words: str

    def holds(self, row: Values) -> bool:
        return text(row.get(self.key)) in self.values


def common(rows: Sequence[Values], others: Sequence[Values], keys: Sequence[str]) -> list[tuple[int, str]]:
    """
    Return descriptions that match some rows and none of the others, each with the number of rows that it matches.

    One description if a conjunction of patterns, one per key, matches all rows. Otherwise up to MAX_PARTS, one for each value
    of some key. [] if neither tells the rows from the others.
    """
    if not rows or not others:
        return []
    if words := _conjunction(rows, others, keys):
        return [(len(rows), words)]
    for key in keys:
        parts: dict[str, list[Values]] = {}
        for row in rows:
            parts.setdefault(text(row.get(key)), []).append(row)
        if 1 < len(parts) <= MAX_PARTS:
            described = [(len(part), _conjunction(part, others, keys)) for part in parts.values()]
            if all(words for _, words in described):
                return described
    return []


def _conjunction(rows: Sequence[Values], others: Sequence[Values], keys: Sequence[str]) -> str:
    """Return a short conjunction of patterns that matches all rows and none of the others; "" if there is none."""
    patterns = [found for key in keys if (found := _pattern(key, rows, others)) is not None]

    def excludes_others(chosen: Sequence[_Pattern]) -> bool:
        return bool(chosen) and not any(all(each.holds(row) for each in chosen) for row in others)

    if not excludes_others(patterns):
        return ""
    # Leave out what is redundant, beginning with the pattern that matches most of the others.
    for pattern in sorted(patterns, key=lambda each: -sum(map(each.holds, others))):
        rest = [each for each in patterns if each is not pattern]
        if excludes_others(rest):
            patterns = rest
    first, *more = (pattern.words for pattern in patterns)
    return f"{first} with {', '.join(more)}" if more else first


def _pattern(key: str, rows: Sequence[Values], others: Sequence[Values]) -> _Pattern | None:
    """Return the pattern of a key's values in some rows; None if it fits every value, or the values are too many to list."""
    everywhere = {text(row[key]): row[key] for row in (*rows, *others) if key in row}
    mine = {text(row[key]): row[key] for row in rows if key in row}
    if not all(key in row for row in rows) or len(mine) == len(everywhere):
        return None
    values = frozenset(mine)
    if len(mine) > 1 and all(number(value) is not None for value in everywhere.values()):
        ascending = sorted(everywhere, key=lambda name: everywhere[name])
        if values == {*ascending[-len(mine) :]}:
            return _Pattern(key, values, f"{key} >= {ascending[-len(mine)]}")
        if values == {*ascending[: len(mine)]}:
            return _Pattern(key, values, f"{key} <= {ascending[len(mine) - 1]}")
    return _Pattern(key, values, f"{key}={' or '.join(mine)}") if len(mine) <= MAX_VALUES else None

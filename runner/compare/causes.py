"""What rows that did not complete have in common: `activation_checkpoint=none with micro_batch >= 4`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshrunner.runner.compare.keys import text

MAX_VALUES = 3
"""Values of one key that a condition lists."""
MAX_PARTS = 3
"""Parts that a group of rows is divided into."""

Values = dict[str, Any]
"""The varying keys of a row."""


class _Condition(NamedTuple):
    """What the values of one key have in common."""

    key: str
    values: frozenset[str]
    words: str

    def holds(self, row: Values) -> bool:
        return text(row.get(self.key)) in self.values


def common(rows: Sequence[Values], others: Sequence[Values], keys: Sequence[str]) -> list[tuple[int, str]]:
    """
    Conditions that hold for some rows and for none of the others, with the number of rows that each one holds for.

    One if a single conjunction of conditions, one per key, covers all rows; else up to MAX_PARTS, one for each value of some
    key. Empty if that does not do either, or if all rows there are fit it.
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
    """Return the fewest conditions, one per key, which all rows meet and none of the others; empty if there are none."""
    conditions = [found for key in keys if (found := _condition(key, rows, others)) is not None]
    chosen: list[_Condition] = []
    left = list(others)
    while left and conditions:
        best = min(conditions, key=lambda condition: sum(condition.holds(row) for row in left))
        conditions.remove(best)
        if all(best.holds(row) for row in left):
            break
        left = [row for row in left if best.holds(row)]
        chosen.append(best)
    if left or not chosen:
        return ""
    for condition in list(chosen):  # one that was chosen early may not be needed any more
        rest = [each for each in chosen if each is not condition]
        if rest and not any(all(each.holds(row) for each in rest) for row in others):
            chosen = rest
    first, *more = (condition.words for condition in sorted(chosen, key=lambda each: keys.index(each.key)))
    return f"{first} with {', '.join(more)}" if more else first


def _condition(key: str, rows: Sequence[Values], others: Sequence[Values]) -> _Condition | None:
    """What the values of a key are in all rows; None if there is nothing to say, or too much."""
    everywhere = {text(row[key]): row[key] for row in (*rows, *others) if key in row}
    mine = {text(row[key]): row[key] for row in rows if key in row}
    if not all(key in row for row in rows) or len(mine) == len(everywhere):
        return None
    values = frozenset(mine)
    if len(mine) > 1 and all(
        isinstance(value, int | float) and type(value) is not bool for value in everywhere.values()
    ):
        lowest, highest = min(mine.values()), max(mine.values())
        between = [name for name, value in everywhere.items() if lowest <= value <= highest]
        if len(between) == len(mine) and lowest > min(everywhere.values()) and highest == max(everywhere.values()):
            return _Condition(key, values, f"{key} >= {text(lowest)}")
        if len(between) == len(mine) and lowest == min(everywhere.values()):
            return _Condition(key, values, f"{key} <= {text(highest)}")
    return _Condition(key, values, f"{key}={' or '.join(mine)}") if len(mine) <= MAX_VALUES else None

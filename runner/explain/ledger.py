"""Compares two ledgers, such as the seconds per step of two rows. A line that only one ledger has counts as zero in the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SHARE = 0.8
"""Share of a difference. A sentence names the largest lines of a ledger until they together explain this share."""
NAMED = 3
"""Maximum number of ledger lines that a sentence names."""
NEGLIGIBLE = 0.05
"""Share of the total difference below which the difference of a single line is ignored."""


class Line(NamedTuple):
    """A line of a ledger, with its values in the baseline (`base`) and in the row that is compared with the baseline (`own`)."""

    name: str
    base: float
    own: float

    @property
    def more(self) -> float:
        return self.own - self.base

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"difference": self.more}


def compared(base: Mapping[str, float], own: Mapping[str, float]) -> list[Line]:
    """Return a Line for each name in one or both ledgers, the largest difference first."""
    return _ordered(Line(name, base.get(name, 0.0), own.get(name, 0.0)) for name in dict.fromkeys([*base, *own]))


def total(name: str, lines: Sequence[Line]) -> Line:
    """Return the sum of `lines` as a single line with the given name."""
    return Line(name, math.fsum(line.base for line in lines), math.fsum(line.own for line in lines))


def grouped(lines: Iterable[Line], group_of: Callable[[str], str]) -> list[Line]:
    """Return the sum of the lines of each group, the largest difference first. `group_of` maps a line's name to its group."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(group_of(line.name), []).append(line)
    return _ordered(total(name, same) for name, same in found.items())


def causes(lines: Sequence[Line], written: Callable[[float], str]) -> str:
    """Name the lines that cause most of the difference between two ledgers. `written` formats a value with its unit."""
    whole, explained = total("", lines).more, 0.0
    found: list[str] = []
    for line in sorted(lines, key=lambda line: -line.more / whole):
        if len(found) == NAMED or explained >= SHARE or line.more / whole < NEGLIGIBLE:
            break
        found.append(f"{written(abs(line.more))} {'more' if line.more > 0 else 'less'} {line.name}")
        explained += line.more / whole
    return ", ".join(found)


def _ordered(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: -abs(line.more))

"""Read and write meshrunner.lock.json, and compare its facts with newly derived ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.text_table import Column
from meshrunner.runner.predict import Fact, Sections
from meshrunner.runner.rundir.files import write_json

LOCK_FILE = Path("meshrunner.lock.json")
OF_BLOCK = re.compile(r"(.* of block)s? (\d+)(?: to (\d+))?")
T = TypeVar("T")


class Change(NamedTuple):
    """A fact whose value differs between the lock file (`locked`) and the new derivation (`now`). A missing fact is None."""

    run: str
    section: str
    name: str
    locked: Fact
    now: Fact

    @property
    def difference(self) -> str:
        if isinstance(self.locked, str) or isinstance(self.now, str):
            return ""
        return f"{(self.now or 0) - (self.locked or 0):+,}"


class Lock(NamedTuple):
    """The content of a lock file."""

    arguments: list[str]
    """Overrides and flags that `lock` was called with."""
    losses: int
    """Number of steps whose losses are locked; 0: none."""
    runs: dict[str, Sections]
    """Facts, keyed by the varying overrides of a run."""
    torch: str = version("torch").partition("+")[0]

    def write(self, path: Path) -> None:
        runs = {name: folded(sections) for name, sections in self.runs.items()}
        write_json(path, self._asdict() | {"runs": runs})

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Read a lock file. Raise ConfigError if the file is missing or damaged."""
        if not path.is_file():
            raise ConfigError(f"lock: no such file: {path}; `meshrunner lock OVERRIDES` writes it")
        try:
            found = json.loads(path.read_text())
            runs = {
                str(name): {section: dict(facts) for section, facts in unfolded(sections).items()}
                for name, sections in found["runs"].items()
            }
            return cls([str(each) for each in found["arguments"]], int(found["losses"]), runs, str(found["torch"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"lock: {path} is damaged ({type(error).__name__}: {error}); "
                "`meshrunner lock OVERRIDES` writes it again"
            ) from None


def folded(sections: Mapping[str, T]) -> dict[str, T]:
    """Merge the sections of neighbouring blocks if their values are equal. A merged section is named `X of blocks 0 to 1`."""
    kinds = list(dict.fromkeys(_place(section)[0] for section in sections))
    ordered = sorted(sections, key=lambda section: (kinds.index(_place(section)[0]), _place(section)[1]))
    found: dict[str, T] = {}
    for _, group in groupby(enumerate(ordered), key=lambda each: _alike(sections, *each)):
        names = [section for _, section in group]
        (kind, first), (_, last) = _place(names[0]), _place(names[-1])
        found[f"{kind}s {first} to {last}" if len(names) > 1 else names[0]] = sections[names[0]]
    return found


def _place(section: str) -> tuple[str, int]:
    """Return the kind of a section and the number of its block, which is -1 for a section that is not about a block."""
    match = OF_BLOCK.fullmatch(section)
    return (match[1], int(match[2])) if match else (section, -1)


def _alike(sections: Mapping[str, T], i: int, section: str) -> tuple[str, int, str]:
    """Return a key that the sections of neighbouring blocks share if their values are equal. `i`: index of the section after
    sorting by kind and block."""
    kind, block = _place(section)
    return kind, block - i, repr(sections[section])


def unfolded(sections: Mapping[str, T]) -> dict[str, T]:
    """Undo `folded`."""
    found: dict[str, T] = {}
    for section, value in sections.items():
        match = OF_BLOCK.fullmatch(section)
        if match and match[3]:
            found |= {f"{match[1]} {number}": value for number in range(int(match[2]), int(match[3]) + 1)}
        else:
            found[section] = value
    return found


def changes(locked: Mapping[str, Sections], found: Mapping[str, Sections]) -> list[Change]:
    """Return the facts that changed. Merge the sections of neighbouring blocks with equal changes."""
    result = []
    for run in dict.fromkeys([*locked, *found]):
        before, after = locked.get(run, {}), found.get(run, {})
        sections = {
            section: _changed(before.get(section, {}), after.get(section, {}))
            for section in dict.fromkeys([*before, *after])
        }
        for section, facts in folded({name: each for name, each in sections.items() if each}).items():
            result += [Change(run, section, name, *both) for name, both in facts.items()]
    return result


def _changed(before: dict[str, Fact], after: dict[str, Fact]) -> dict[str, tuple[Fact, Fact]]:
    both = {name: (before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def table(found: Sequence[Change]) -> list[Column]:
    """Return the columns of a table of changes."""
    columns = [
        Column("run", [each.run for each in found]),
        Column("where", [each.section for each in found]),
        Column("what", [each.name for each in found]),
        Column("locked", [_text(each.locked) for each in found]),
        Column("now", [_text(each.now) for each in found]),
        Column("difference", [each.difference for each in found]),
    ]
    return columns if any(each.run for each in found) else columns[1:]


def _text(fact: Any) -> str:
    return "" if fact is None else f"{fact:,}" if isinstance(fact, int) else str(fact)

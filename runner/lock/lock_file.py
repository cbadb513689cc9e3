"""Reads and writes meshrunner.lock.json, and compares its facts with newly derived ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.text_table import Column
from meshrunner.runner.lock.facts import OF_CODE, Fact, Sections, folded, unfolded
from meshrunner.runner.rundir.files import write_json

LOCK_FILE = Path("meshrunner.lock.json")


class Change(NamedTuple):
    """A fact that differs from the locked one. A fact that only one of them has is None in the other."""

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
        """Read a lock file. Raise ConfigError if there is none or it is damaged."""
        if not path.is_file():
            raise ConfigError(f"lock: no such file: {path}; `meshrunner lock OVERRIDES` writes it")
        try:
            found = json.loads(path.read_text())
            runs = {str(name): unfolded(sections) for name, sections in found["runs"].items()}
            return cls([str(each) for each in found["arguments"]], int(found["losses"]), runs, str(found["torch"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"lock: {path} is damaged ({type(error).__name__}: {error}); write it again") from None


def changes(locked: Mapping[str, Sections], found: Mapping[str, Sections]) -> list[Change]:
    """Return the facts that changed. Neighbouring blocks with equal changes are one section."""
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


def of_code(change: Change) -> bool:
    """Return whether a changed fact does not depend on torch's version."""
    return change.section in OF_CODE


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
    return columns if len(_runs(found)) > 1 or _runs(found) != {""} else columns[1:]


def _runs(found: Iterable[Change]) -> set[str]:
    return {each.run for each in found}


def _text(fact: Any) -> str:
    return "" if fact is None else f"{fact:,}" if isinstance(fact, int) else str(fact)

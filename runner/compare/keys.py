"""Which settings vary between runs, and under what names a person knows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshrunner.recipes.affects import affecting
from meshrunner.recipes.config_diff import flatten
from meshrunner.recipes.option import Affects
from meshrunner.runner.compare.runs import Run

MEASURED = Affects.SPEED | Affects.RESULT | Affects.FIGURES
"""Effects of the keys that tell runs apart. Runs that differ in no such key are repeats of each other."""

FOLLOWS = {"optimizer.lr": "model"}
"""Keys whose default comes with an option of another group; they count as keys of that group."""


def _text_hash(run: Run) -> str | None:
    """Eight digits that stand for a tokenizer and the beginning of the text; None for data without text."""
    data = run.summary.data or {}
    if not {"tokenizer_hash", "beginning_hash"} <= data.keys():
        return None
    return hashlib.blake2b(f"{data['tokenizer_hash']} {data['beginning_hash']}".encode(), digest_size=4).hexdigest()


FACTS: dict[str, Callable[[Run], Any]] = {
    "device": lambda run: run.summary.device,
    "world_size": lambda run: run.summary.world_size,
    "torch": lambda run: run.environment.packages.get("torch"),
    "auto precision": lambda run: run.precision if _option(run, "precision") == "auto" and run.environment else None,
    "text": _text_hash,
    "meshrunner": lambda run: run.environment.packages.get("meshrunner"),
    "commit": lambda run: (run.environment.git_commit or "")[:8] or None,
}
"""What no configuration says, but decides what is measured, too."""


def text(value: Any) -> str:
    """Return a value as one types it: `true`, `null`, `[0.9, 0.95]`, `fsdp2`."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def first_of(names: Sequence[str], most: int, between: str = ", ") -> str:
    """`fsdp1, fsdp2 and 3 more`."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def row_name(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The values of a row in a sentence: `fsdp2 full micro_batch=4`; options by their name, other settings with their key."""
    given = [(key, values[key]) for key in keys if key in values]
    return " ".join(text(v) if isinstance(v, str) else f"{key.rpartition('.')[2]}={text(v)}" for key, v in given)


def relevant(run: Run) -> dict[str, Any]:
    """Return the flattened configuration without keys that do not affect what is measured."""
    return affecting(flatten(run.config), MEASURED)


class Keys:
    """
    What varies between some runs.

    Where whole options differ, the group's name is one key and the option's name its value; keys inside the group count
    as well only if they vary under one and the same option, or if the user set them. A fact that is no setting (device,
    versions) is a key if runs of equal configuration differ in it; else it is in `remarks`.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._flat = {run.path: relevant(run) for run in runs}
        self._settings = {path: json.dumps(flat, sort_keys=True, default=str) for path, flat in self._flat.items()}
        self._facts: dict[str, Callable[[Run], Any]] = {}
        known = [run for run in runs if run.config]
        names = dict.fromkeys(key for run in known for key in self._flat[run.path])  # in the order of the configuration
        differing = [name for name in names if _differ(self._flat[run.path].get(name, ...) for run in known)]
        groups = [group for group in _groups(known) if _differ(_option(run, group) for run in known)]
        self._groups = frozenset(groups)
        typed = set[str]().union(*(run.typed for run in known))
        shown = []
        for name in differing:
            around = (name.partition(".")[0], FOLLOWS.get(name))
            group = next((group for group in groups if group in around), None)
            if group is None:
                shown.append(name)
                continue
            if group not in shown:
                shown.append(group)
            values = [(_option(run, group), self._flat[run.path].get(name, ...)) for run in known]
            if name in typed or _differ_within(values):
                shown.append(name)
        self.remarks: list[str] = []
        for fact, of in FACTS.items():
            stated = [(self._settings[run.path], value) for run in known if (value := of(run)) is not None]
            different = sorted({text(value) for _, value in stated})
            if _differ_within(stated):
                self._facts[fact] = of
            elif len(different) > 1 and fact != "world_size":  # that follows from the layout, more often than not
                self.remarks.append(f"the runs are of more than one {fact}: {', '.join(different)}")
        self.names = [*shown, *self._facts]

    def of(self, run: Run) -> dict[str, Any]:
        """Return the varying keys of a run; what it does not have is left out."""
        beside: dict[str, Any] = {group: _option(run, group) for group in self._groups}
        beside |= {fact: of(run) for fact, of in self._facts.items()}
        found = self._flat[run.path] | {name: value for name, value in beside.items() if value is not None}
        return {name: found[name] for name in self.names if name in found}

    def identity(self, run: Run) -> str:
        """Equal for two runs exactly if they are repeats of each other."""
        if not run.config:
            return str(run.path)
        return "".join([self._settings[run.path], *(f"\n{text(of(run))}" for of in self._facts.values())])


def _option(run: Run, group: str) -> str | None:
    """Return the name of the option that a run has in a group; its kind where no name is on record."""
    section = run.config.get(group)
    kind = section.get("kind") if isinstance(section, dict) else None
    return run.choices.get(group, kind if isinstance(kind, str) else None)


def _groups(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name, value in run.config.items() if isinstance(value, dict))
    return [name for name in names if any(name in run.choices for run in runs)]


def _differ(values: Iterable[Any]) -> bool:
    return len({"..." if value is ... else text(value) for value in values}) > 1


def _differ_within(pairs: Iterable[tuple[str | None, Any]]) -> bool:
    """Return whether two values of (option or configuration, value) differ under the same one."""
    found: dict[str | None, list[Any]] = {}
    for under, value in pairs:
        found.setdefault(under, []).append(value)
    return any(map(_differ, found.values()))

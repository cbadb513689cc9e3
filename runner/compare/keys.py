"""Which settings vary between runs, and under what names a person knows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from meshrunner.runner.compare.runs import Run

IRRELEVANT = (
    "tracker",
    "sweep",
    "objective",
    "seed",
    "launch.port",
    "launch.start_timeout_minutes",
    "launch.timeout_minutes",
    "checkpoint.keep",
)
"""Keys, or sections, that do not change what is measured. Runs that differ in these alone are repeats of each other."""

FOLLOWS = {"optimizer.lr": "model"}
"""Keys whose default comes with an option of another group; they count as keys of that group."""

FACTS: dict[str, Callable[[Run], Any]] = {
    "device": lambda run: run.summary.get("device"),
    "world_size": lambda run: run.summary.get("world_size"),
    "torch": lambda run: _version(run, "torch"),
    "meshrunner": lambda run: _version(run, "meshrunner"),
    "commit": lambda run: str(run.environment.get("git_commit") or "")[:8] or None,
}
"""What no configuration says, but decides what is measured, too."""


def _version(run: Run, package: str) -> Any:
    packages = run.environment.get("packages")
    return packages.get(package) if isinstance(packages, dict) else None


def text(value: Any) -> str:
    """A value as one types it: `true`, `null`, `[0.9, 0.95]`, `fsdp2`."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def relevant(run: Run) -> dict[str, Any]:
    """The flattened configuration, as far as it decides what is measured."""
    return {
        key: value
        for key, value in flatten(run.config).items()
        if not any(key == name or key.startswith(f"{name}.") for name in IRRELEVANT)
    }


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
        self.groups = frozenset(groups)
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
            if name in typed or self._varies_within(known, group, name):
                shown.append(name)
        self.remarks: list[str] = []
        for fact, of in FACTS.items():
            values = {text(value) for run in known if (value := of(run)) is not None}
            if len(values) < 2:
                continue
            if self._differ_in_repeats(known, of):
                self._facts[fact] = of
            elif fact != "world_size":  # that follows from the layout, more often than not
                self.remarks.append(f"the runs are of more than one {fact}: {', '.join(sorted(values))}")
        self.names = [*shown, *self._facts]

    def of(self, run: Run) -> dict[str, Any]:
        """The varying keys of a run; what it does not have is left out."""
        flat = self._flat[run.path]
        found = {}
        for name in self.names:
            if name in self._facts:
                value = self._facts[name](run)
            elif name in self.groups:
                value = _option(run, name)
            elif name in flat:
                found[name] = flat[name]
                continue
            else:
                continue
            if value is not None:
                found[name] = value
        return found

    def identity(self, run: Run) -> str:
        """Equal for two runs exactly if they are repeats of each other."""
        if not run.config:
            return str(run.path)
        return "".join([self._settings[run.path], *(f"\n{text(of(run))}" for of in self._facts.values())])

    def _varies_within(self, runs: Sequence[Run], group: str, name: str) -> bool:
        """Whether a key has two values under one option of its group."""
        values: dict[str | None, list[Any]] = {}
        for run in runs:
            values.setdefault(_option(run, group), []).append(self._flat[run.path].get(name, ...))
        return any(_differ(found) for found in values.values())

    def _differ_in_repeats(self, runs: Sequence[Run], of: Callable[[Run], Any]) -> bool:
        found: dict[str, set[str]] = {}
        for run in runs:
            if (value := of(run)) is not None:
                found.setdefault(self._settings[run.path], set()).add(text(value))
        return any(len(values) > 1 for values in found.values())


def _option(run: Run, group: str) -> str | None:
    """The name of the option that a run has in a group; its kind where no name is on record."""
    section = run.config.get(group)
    kind = section.get("kind") if isinstance(section, dict) else None
    return run.choices.get(group, kind)


def _groups(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name, value in run.config.items() if isinstance(value, dict))
    return [name for name in names if any(name in run.choices for run in runs)]


def _differ(values: Iterable[Any]) -> bool:
    return len({"..." if value is ... else text(value) for value in values}) > 1

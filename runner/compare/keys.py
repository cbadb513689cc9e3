"""Find settings and facts that differ between runs. A fact, such as the torch version, is not a setting but can affect speed."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshrunner.recipes.config_keys import affected_by, flatten, value_at
from meshrunner.recipes.option import Affects
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.rundir import key_of

MEASURED = Affects.SPEED | Affects.RESULT | Affects.FIGURES
"""Kinds of effect that can change a measurement. Repeats of a run agree in all settings that can change a measurement."""

DIRECTORY = "directory"
"""Key of `Run.directory` in the table."""
FOLLOWS = {"optimizer.lr": "model"}
"""Keys whose default depends on a group, mapped to that group. If the model varies, default learning rates need no column."""


def _text_hash(run: Run) -> str | None:
    """Return one short hash of the tokenizer and the beginning of the training text; None if the data is not text."""
    data = run.summary.data or {}
    if not {"tokenizer_hash", "beginning_hash"} <= data.keys():
        return None
    import hashlib  # imported here because `status` starts faster without hashlib

    return hashlib.blake2b(f"{data['tokenizer_hash']} {data['beginning_hash']}".encode(), digest_size=4).hexdigest()


def emulated(run: Run) -> str:
    """Return the rank that a run emulated, in the form `rank 0 of 64`; "" if every rank was executed."""
    rank = value_at(run.config, "launch.emulate")
    return "" if rank in (None, ...) else f"rank {rank} of {run.summary.world_size or '?'}"


FACTS: dict[str, Callable[[Run], Any]] = {
    "device": lambda run: run.summary.device,
    "world_size": lambda run: run.summary.world_size,
    "torch": lambda run: run.environment.packages.get("torch"),
    "auto precision": lambda run: run.precision if option_of(run, "precision") == "auto" and run.environment else None,
    "text": _text_hash,
    "meshrunner": lambda run: run.environment.packages.get("meshrunner"),
    "commit": lambda run: (run.environment.git_commit or "")[:8] or None,
}
"""Functions that read the facts about a run, keyed by the fact's title."""


def text(value: Any) -> str:
    """Return a value as a user types it: `true`, `null`, `[0.9, 0.95]`, `fsdp2`."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def first_of(names: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """Join the first `most` names, and append the number of omitted names: `fsdp1, fsdp2 and 3 more`."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def row_name(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return a short name of a row, such as `fsdp2 full micro_batch=4`. A value that is not a string appears after its key."""
    given = [(key, values[key]) for key in keys if key in values]
    return " ".join(text(v) if isinstance(v, str) else f"{key.rpartition('.')[2]}={text(v)}" for key, v in given)


class Keys:
    """The settings and facts that vary between runs, listed in `names`. The table has a column for each listed setting or fact.

    A group such as `parallelism` is listed if runs chose different options. A key of a listed group, such as `parallelism.shard`,
    is listed only if a user typed the key, or if runs with the same option have different values. A fact is listed if it differs
    between two runs with equal settings. The version of torch is also listed if `launch.python` varies. For the facts that
    vary but are not listed, `remarks` holds one sentence each, except for world_size.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        known = [run for run in runs if run.config]
        configs = {run.path: flatten(run.config) for run in runs}
        # Look up the effects of differing keys only: the look-up imports the classes that declare the keys.
        names = _differing([configs[run.path] for run in known])
        self._flat = {
            path: {name: flat[name] for name in names if name in flat and affected_by(name, flat) & MEASURED}
            for path, flat in configs.items()
        }
        for run in runs:
            self._flat[run.path] |= {DIRECTORY: run.directory} if run.directory else {}
        differing = _differing([self._flat[run.path] for run in known])
        self._settings = {path: json.dumps(flat, sort_keys=True, default=str) for path, flat in self._flat.items()}
        self._facts: dict[str, Callable[[Run], Any]] = {}
        chosen = dict.fromkeys(group for run in known for group in run.config if group in run.choices)
        self._groups = [group for group in chosen if _differ((None, option_of(run, group)) for run in known)]
        typed = {key_of(override) for run in known for override in run.task}
        shown = []
        for name in differing:
            around = (name.partition(".")[0], FOLLOWS.get(name))
            group = next((group for group in self._groups if group in around), None)
            if group is None:
                shown.append(name)
                continue
            if group not in shown:
                shown.append(group)
            values = [(option_of(run, group), self._flat[run.path].get(name, ...)) for run in known]
            if name in typed or _differ(values):
                shown.append(name)
        self.remarks: list[str] = []
        for fact, of in FACTS.items():
            stated = [(self._settings[run.path], value) for run in known if (value := of(run)) is not None]
            different = sorted({text(value) for _, value in stated})
            if _differ(stated) or (fact == "torch" and "launch.python" in shown and len(different) > 1):
                self._facts[fact] = of
            elif len(different) > 1 and fact != "world_size":  # the layout usually determines world_size
                self.remarks.append(f"the runs differ in {fact}: {', '.join(different)}")
        self.settings = shown
        """The settings in `names`, without the facts."""
        self.names = [*shown, *self._facts]

    def of(self, run: Run) -> dict[str, Any]:
        """Return the values of a run for the keys in `names`. Leave out keys that the run does not have."""
        added: dict[str, Any] = {group: option_of(run, group) for group in self._groups}
        added |= {fact: of(run) for fact, of in self._facts.items()}
        found = self._flat[run.path] | {name: value for name, value in added.items() if value is not None}
        return {name: found[name] for name in self.names if name in found}

    def configuration(self, run: Run) -> str:
        """Return a text that is equal for runs with equal settings, even if facts such as the commit differ."""
        return self._settings[run.path]

    def identity(self, run: Run) -> str:
        """Return a text that is equal for repeats of one run and different for all other runs."""
        if not run.config:
            return str(run.path)
        return "".join([self._settings[run.path], *(f"\n{text(of(run))}" for of in self._facts.values())])


def option_of(run: Run, group: str) -> str | None:
    """Return the option that a run chose in a group: its name such as `llama3_8b`, or its `kind` if the name is not recorded."""
    kind = value_at(run.config, f"{group}.kind")
    return run.choices.get(group, kind if isinstance(kind, str) else None)


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that have different values in two configurations, or that some configurations have and others lack."""
    names = dict.fromkeys(key for config in configs for key in config)
    return [name for name in names if _differ((None, config.get(name, ...)) for config in configs)]


def _differ(pairs: Iterable[tuple[str | None, Any]]) -> bool:
    """Return whether any two of the (group, value) pairs have the same group but different values."""
    found = {(group, text(value)) for group, value in pairs}
    return len(found) > len({group for group, _ in found})

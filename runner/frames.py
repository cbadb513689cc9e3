"""Implement `meshrunner.load`, `meshrunner.run` and `meshrunner.sweep` for Python scripts and notebooks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import Comparison, compare_folders, compare_runs
from meshrunner.runner.compare.export import records
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.keys import text
from meshrunner.runner.compare.table import html
from meshrunner.runner.process.receipt import run_command

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Loaded:
    """Results of runs, as two DataFrames and a comparison. Notebooks show the table that `meshrunner compare` prints."""

    comparison: Comparison

    @cached_property
    def rows(self) -> DataFrame:
        """One row per combination of settings, merged over repeats. The columns are the keys of `meshrunner compare --json`."""
        from pandas import DataFrame

        return DataFrame([record | _hashable(self.keys, record) for record in records(self.comparison)])

    @cached_property
    def events(self) -> DataFrame:
        """One row per run and step. The columns are `run` (a directory), `state`, each of `keys`, `seed`, `measured`, and the
        keys of events.jsonl. `measured` is True for the steps that count towards the medians in summary.json."""
        from pandas import DataFrame

        steps = []
        for row in self.comparison.rows:
            settings = _hashable(self.keys, row.values)
            for run in row.runs:
                counted = {each.step for each in run.measured}
                shared = {"run": str(run.path), "state": run.state} | settings | {"seed": run.seed}
                steps += [shared | {"measured": each.step in counted} | each for each in run.events]
        return DataFrame(steps)

    @property
    def keys(self) -> list[str]:
        """Configuration keys whose values differ between runs. They are the first columns of `rows`. Lists are text there."""
        return self.comparison.keys

    @cached_property
    def findings(self) -> list[str]:
        """Sentences about the fastest row, the lowest memory, the gain over the baseline, and the agreement of losses."""
        return findings(self.comparison)

    @cached_property
    def runs(self) -> list[Run]:
        """Individual runs, in the order of `rows`."""
        return [
            Run(compare_runs([run]), run.path, run.state, run.reason, run.config, run.summary.as_json())
            for run in self.comparison.runs
        ]

    def __repr__(self) -> str:
        return "\n".join([*self.findings, str(self.rows)])

    def _repr_html_(self) -> str:
        return html(self.comparison)


@dataclass(frozen=True, repr=False)
class Run(Loaded):
    """A single run, such as the result of `meshrunner.run`."""

    folder: Path
    """The run directory."""
    state: str
    """State of the run, such as `completed`, `failed` or `oom`."""
    reason: str
    """Reason for the state, for example the error of the rank that failed first; empty if the run completed."""
    config: dict[str, Any]
    """The resolved configuration."""
    summary: dict[str, Any]
    """The figures and facts in summary.json."""


@dataclass(frozen=True, repr=False)
class Sweep(Loaded):
    """The result of `meshrunner.sweep`."""

    folder: Path
    """The sweep directory."""


def load_runs(folders: Sequence[str | os.PathLike[str]], baseline: str | None) -> Loaded:
    """Read and compare the runs in `folders` (run or sweep directories) for `meshrunner.load`."""
    if not folders:
        raise ConfigError("load: pass at least one run or sweep directory")
    return Loaded(compare_folders([Path(folder) for folder in folders], baseline))


def execute(flag: str, overrides: Sequence[str]) -> Sweep:
    """Execute `meshrunner run FLAG OVERRIDES` for `meshrunner.run` and `meshrunner.sweep`."""
    folder = run_command(flag, overrides)
    return Sweep(compare_folders([folder], None), folder)


def _hashable(keys: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `keys`, with lists and mappings as text because pandas cannot group rows by a list or mapping."""
    found = {key: values.get(key) for key in keys}
    return {key: text(value) if isinstance(value, list | dict) else value for key, value in found.items()}

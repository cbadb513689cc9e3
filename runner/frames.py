"""Load runs as pandas DataFrames, for use in notebooks. This module implements `meshrunner.load`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import compare_folders
from meshrunner.runner.compare.export import records
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.keys import text

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Loaded:
    """Result of `meshrunner.load`: runs as two DataFrames, and the sentences that `meshrunner compare` prints first."""

    rows: DataFrame
    """One row per combination of settings, merged over repeats. The columns are the keys of `meshrunner compare --json`."""
    events: DataFrame
    """One row per run and step. Columns: `run` (a directory), `state`, the keys in `keys`, `seed`, and those in events.jsonl."""
    keys: list[str] = field(default_factory=list)
    """Configuration keys that differ between the runs: the first columns of `rows`. Lists become text, such as `[0.9, 0.95]`."""
    findings: list[str] = field(default_factory=list)
    """Sentences on the fastest row, the least memory, the gain over the baseline, and whether losses agree."""

    def __repr__(self) -> str:
        return "\n".join([*self.findings, str(self.rows)])


def load_runs(folders: Sequence[str | os.PathLike[str]], baseline: str | None) -> Loaded:
    """Read and compare the runs in `folders` (run or sweep directories) for `meshrunner.load`."""
    if not folders:
        raise ConfigError("load: pass at least one run or sweep directory")
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise ImportError("meshrunner.load needs pandas: pip install pandas") from error
    comparison = compare_folders([Path(folder) for folder in folders], baseline)
    rows = [record | _hashable(comparison.keys, record) for record in records(comparison)]
    events = [
        {"run": str(run.path), "state": run.state, **_hashable(comparison.keys, row.values), "seed": run.seed} | event
        for row in comparison.rows
        for run in row.runs
        for event in run.events
    ]
    return Loaded(DataFrame(rows), DataFrame(events), comparison.keys, findings(comparison))


def _hashable(keys: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `keys`, with lists and mappings as text because pandas cannot group rows by a list or mapping."""
    found = {key: values.get(key) for key in keys}
    return {key: text(value) if isinstance(value, list | dict) else value for key, value in found.items()}

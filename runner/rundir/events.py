"""Read `events.jsonl` and `evals.jsonl`, to which a run appends one JSON object (a row) per training step or evaluation."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

from meshrunner.recipes.storage import open_regular
from meshrunner.runner.rundir.files import EVENTS
from meshrunner.runner.rundir.states import is_count

CHUNK_BYTES = 8 << 20
TYPICAL_ROW = 1 << 10
"""Bytes that `last_rows` reads for each requested row, twice the size of a typical row."""


class StepRow(dict[str, float | None]):
    """A row of events.jsonl: figures (measured numbers) of a step, keyed by name, such as `train/loss`. Unknown figures are None.
    Pydantic does not validate rows: a run may have a million rows, and validation would be slower than parsing."""

    @property
    def step(self) -> int:
        """The step, counted from 1. An evaluation before the first step has step 0."""
        return cast(int, self["step"])

    @property
    def attempt(self) -> int:
        """The attempt that ran the step, counted from 1."""
        return cast(int, self.get("attempt", 1))


class Tail:
    """Reader of the events.jsonl or evals.jsonl to which a run is still appending rows. Damaged lines are skipped."""

    def __init__(self, run_dir: Path, name: str = EVENTS) -> None:
        self.path = run_dir / name
        self._offset = 0
        self._rest = b""

    def read(self) -> list[StepRow]:
        """Return the complete rows that were appended since the last call, or [] if the file is missing or not a regular file."""
        rows: list[StepRow] = []
        with suppress(FileNotFoundError, ValueError), open_regular(self.path) as file:
            file.seek(self._offset)
            while new := file.read(CHUNK_BYTES):
                self._offset += len(new)
                *lines, self._rest = (self._rest + new).split(b"\n")
                rows += _parsed(lines)
        return rows


def _parsed(lines: Iterable[bytes]) -> Iterator[StepRow]:
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and is_count(row.get("step")) and is_count(row.get("attempt", 1)):
            for key, value in row.items():
                if type(value) is not float and value is not None and type(value) is not bool and not is_count(value):
                    row[key] = None  # a figure must be a number
            yield StepRow(row)


def last_rows(run_dir: Path, count: int) -> list[StepRow]:
    """Return a run's newest rows (at most `count`), oldest first. Read only the end of the file."""
    path = run_dir / EVENTS
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - count * TYPICAL_ROW))
            lines = file.read().split(b"\n")
    except (OSError, ValueError):
        return []
    return list(_parsed(lines[1:-1] if begin else lines[:-1]))[-count:]  # the first line may be incomplete


def read_events(run_dir: Path, name: str = EVENTS) -> list[StepRow]:
    """Return one row per step of events.jsonl or evals.jsonl, in order."""
    rows: list[StepRow] = []
    add_rows(rows, Tail(run_dir, name).read())
    return rows


def add_rows(rows: list[StepRow], new: Iterable[StepRow]) -> None:
    """Append rows. A new row replaces rows of the same and later steps: after a resume from step 10, the new row of step 11
    replaces the old rows 11, 12, ..."""
    for row in new:
        while rows and rows[-1].step >= row.step:
            rows.pop()
        rows.append(row)

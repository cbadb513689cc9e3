"""Reading `events.jsonl`: one JSON object per step, appended while a run trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshrunner.runner.rundir.files import EVENTS

StepRow = dict[str, Any]


class Tail:
    """A reader of appended rows. A half-written last line is kept until it is complete; a damaged one is skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def read(self) -> list[StepRow]:
        """The rows completed since the last call, oldest first; [] while there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [row for line in lines if (row := _parse(line)) is not None]


def _parse(line: bytes) -> StepRow | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_events(run_dir: Path) -> list[StepRow]:
    """
    One row per step, in order.

    A resumed run repeats the steps after its checkpoint: with its first row, all rows from that step on are out of date, those
    of steps that it never reached again, too.
    """
    rows: list[StepRow] = []
    for row in Tail(run_dir / EVENTS).read():
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows

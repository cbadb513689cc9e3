"""Results of the GPU bench. Each test or measurement becomes a line of results.jsonl and a row of the Markdown document.

A folder can hold the results of several calls. Each call begins with a line that records the date, the command and the machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.gpu.machine import Machine

FILE = "results.jsonl"
TAIL = 30
"""Number of lines to keep from the end of a failed row's log. The log itself may be lost if the bench runs remotely."""
State = Literal["works", "refused", "failed", "skipped", "not run"]


@dataclass(frozen=True)
class Result:
    """The result of one test or measurement: a row of the document."""

    part: str
    """Table of the row, such as `grid` or `figures`."""
    what: str
    """Text that identifies the row in its table."""
    state: State
    """skipped: this machine cannot run the row. not run: the bench had too little time left."""
    reason: str = ""
    """Reason for a state other than `works`. If the row works: a remark, or ""."""
    log: str = ""
    """Path of the log that shows a failure, or ""."""
    seconds: float = 0.0
    """Seconds from the command's start to its end."""
    figures: dict[str, Any] = field(default_factory=dict)
    round: int = 1
    """1 for the first measurement of a row, 2 for its second, and so on."""
    tail: list[str] = field(default_factory=list)
    """Last lines of `log`."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.what, self.round


class Call(NamedTuple):
    """One call of `python -m bench gpu`."""

    date: str
    command: str
    commit: str
    """git commit of the working tree, or ""."""
    machine: Machine


def read(file: Path) -> tuple[list[Call], list[Result]]:
    """Return the calls and the merged results of a results.jsonl. Skip a line that a crash cut off."""
    calls: list[Call] = []
    results: list[Result] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "machine" in row:
            calls.append(Call(**row | {"machine": Machine.of(row["machine"])}))
        else:
            results.append(Result(**row))
    return calls, merged(results)


def merged(results: Iterable[Result]) -> list[Result]:
    """Return the newest result of each row, in order of first appearance. A later `not run` does not replace a result."""
    newest: dict[tuple[str, str, int], Result] = {}
    for each in results:
        if each.key not in newest or each.state != "not run":
            newest[each.key] = each
    return [*newest.values()]


class Results:
    """All results in a folder. `add` appends each result to the file at once, so a crash loses no result."""

    def __init__(self, file: Path, write: Callable[[list[Call], list[Result]], None]) -> None:
        self.calls, self.all = read(file)
        self._file, self._write, self._lock = file, write, threading.Lock()

    def begin(self, call: Call) -> None:
        """Record a call."""
        self.calls.append(call)
        self._append(call._asdict() | {"machine": call.machine._asdict()})

    def find(self, part: str, what: str, round: int = 1) -> Result | None:
        return next((each for each in self.all if each.key == (part, what, round)), None)

    def add(self, result: Result) -> None:
        """Append a result to the file, rewrite the document with all results, and print the result."""
        with self._lock:
            log = Path(result.log)
            if result.state == "failed" and log.is_file():
                result.tail.extend(log.read_text(errors="replace").splitlines()[-TAIL:])
            self.all = merged([*self.all, result])
            self._append(asdict(result))
            self._write(self.calls, self.all)
            reason = f": {result.reason}" if result.reason else ""
            shown = f" ({result.log})" if result.log else ""
            print(f"{result.state:8}{result.seconds:4.0f} s  {result.part} {result.what}{reason}{shown}", flush=True)
            for line in result.tail:
                print(f"  | {line}", flush=True)

    def write(self) -> None:
        self._write(self.calls, self.all)

    def _append(self, row: dict[str, Any]) -> None:
        cut_off = self._file.exists() and not self._file.read_bytes().endswith(b"\n")
        with self._file.open("a") as file:
            file.write("\n" * cut_off + json.dumps(row) + "\n")

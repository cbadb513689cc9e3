"""Results of the GPU bench. Each test or measurement becomes a line of results.jsonl and a row of the Markdown document."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

TAIL = 30
"""Number of lines to print from the end of a failed row's log."""
State = Literal["works", "refused", "failed", "not run"]


@dataclass(frozen=True)
class Result:
    """The result of one test or measurement: a row of the document."""

    part: str
    """Table of the row: `grid`, `proofs` or `figures`."""
    what: str
    """Text that identifies the row."""
    state: State
    reason: str = ""
    """Reason for a state other than `works`. If the row works: a remark, or ""."""
    log: str = ""
    """Path of the log that shows a failure, or ""."""
    seconds: float = 0.0
    """Seconds from the command's start to its end."""
    figures: dict[str, Any] = field(default_factory=dict)


class Results:
    """All results so far, in the order in which rows ended. A result is saved when it is added, so a crash loses none."""

    def __init__(self, file: Path, write: Callable[[list[Result]], None]) -> None:
        self.all: list[Result] = []
        self._file, self._write, self._lock = file, write, threading.Lock()

    def add(self, result: Result) -> None:
        """Append a result to the file, rewrite the document with all results, and print the result."""
        with self._lock:
            self.all.append(result)
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            self._write(self.all)
            reason = f": {result.reason}" if result.reason else ""
            log = f" ({result.log})" if result.log else ""
            print(f"{result.state:8}{result.seconds:4.0f} s  {result.part} {result.what}{reason}{log}", flush=True)
            if result.state == "failed" and result.log and Path(result.log).is_file():  # the log may be deleted later
                lines = Path(result.log).read_text(errors="replace").splitlines()[-TAIL:]
                print("\n".join(f"  | {line}" for line in lines), flush=True)

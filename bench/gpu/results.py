"""What the bench has found so far: a line of results.jsonl for each row, from which the document is made anew each time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

TAIL = 30
"""Lines of a failed row's log that are printed."""
State = Literal["works", "refused", "failed", "not run"]


@dataclass(frozen=True)
class Result:
    """A row of the document."""

    part: str
    """The table it belongs to: `grid`, `proofs` or `figures`."""
    what: str
    """What tells it from other rows."""
    state: State
    reason: str = ""
    """Why it was refused, failed or was not run; of one that works, a remark."""
    log: str = ""
    """File with more about a failure."""
    seconds: float = 0.0
    """From the command's start to its end."""
    figures: dict[str, Any] = field(default_factory=dict)


class Results:
    """All results, in the order in which they came in; written down at once, so that a bench that is killed loses none."""

    def __init__(self, file: Path, write: Callable[[list[Result]], None]) -> None:
        """write: makes the document of the results so far."""
        self.all: list[Result] = []
        self._file, self._write, self._lock = file, write, threading.Lock()

    def add(self, result: Result) -> None:
        with self._lock:
            self.all.append(result)
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            self._write(self.all)
            reason = f": {result.reason}" if result.reason else ""
            log = f" ({result.log})" if result.log else ""
            print(f"{result.state:8}{result.seconds:4.0f} s  {result.part} {result.what}{reason}{log}", flush=True)
            if result.state == "failed" and result.log and Path(result.log).is_file():  # it may be gone afterwards
                lines = Path(result.log).read_text(errors="replace").splitlines()[-TAIL:]
                print("\n".join(f"  | {line}" for line in lines), flush=True)

"""Trackers as a user may write them: not registered anywhere, and each wrong in its own way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.trackers.base import Sink, Tracker
from meshrunner.runner.trackers.description import RunRecord


class ToFile(Tracker):
    """Writes what it is given to own_tracker.jsonl; with `trouble`, goes wrong."""

    trouble: str | None = None

    def open(self, run: RunRecord) -> Sink:
        if self.trouble == "raise at open":
            raise ValueError("no account\nand a second line")
        if self.trouble == "hang at open":
            print("hangs", flush=True)
            subprocess.Popen(["sleep", "300"], start_new_session=True)
            time.sleep(300)
        return FileSink(run.run_dir / "own_tracker.jsonl", self.trouble)


class FileSink:
    def __init__(self, path: Path, trouble: str | None) -> None:
        self.path = path
        self.trouble = trouble

    def log(self, row: StepRow) -> None:
        if row["step"] == 3 and self.trouble == "raise in log":
            raise KeyError("train/loss")
        if row["step"] == 3 and self.trouble == "exit in log":
            raise SystemExit(0)
        if row["step"] == 3 and self.trouble == "crash in log":
            os.kill(os.getpid(), signal.SIGSEGV)
        self._write(row)

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        if self.trouble == "hang in finish":
            time.sleep(300)
        self._write({"summary": summary, "state": state, "reason": reason, "nice": os.nice(0)})

    def _write(self, value: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(value) + "\n")

"""Starting `meshrunner`, and what became of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.results import State
from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.files import ERROR, STATUS, SUMMARY, rank_log, read_json

REPOSITORY = Path(__file__).parents[2]
PARAGRAPH = 30
"""Lines of what a command said last."""
MESHRUNNER = (sys.executable, "-m", "meshrunner")
"""Also where packages are on PYTHONPATH only, and no console script was installed."""


class Ended(NamedTuple):
    """A command that has ended."""

    code: int | None
    """None: it was stopped."""
    log: Path
    """What it printed."""
    begin: float
    """Unix time of its start."""
    seconds: float


@dataclass
class Commands:
    """Runs commands in a folder, until a time."""

    folder: Path
    until: float
    """Monotonic time at which the bench is to end."""
    limit: float
    """Seconds after which a command hangs."""
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self, name: str, *command: str, **environment: str) -> Ended:
        """Run a command to its end, or to the time limit; what it prints goes to NAME.log."""
        begin, clock = time.time(), time.monotonic()
        log = self.folder / f"{name}.log"
        # Compiled code is not another bench's: what a start takes is a cold start the first time.
        own = {"MESHRUNNER_CACHE": str(self.folder / "cache"), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | own | environment
            )
            self.running.add(process)
            try:
                code = process.wait(max(1.0, min(self.limit, self.until - clock)))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _stop(process)
                self.running.discard(process)
        return Ended(code, log, begin, time.monotonic() - clock)

    def meshrunner(self, name: str, *arguments: str, **environment: str) -> Ended:
        """`meshrunner ARGUMENTS`."""
        return self.run(name, *MESHRUNNER, *arguments, **environment)

    def stop(self) -> None:
        """End what runs; nothing more is to be started."""
        self.until = 0.0
        for process in [*self.running]:
            _stop(process)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs; its workers end with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Outcome(NamedTuple):
    """What became of a run."""

    state: State
    reason: str
    log: str
    summary: dict[str, Any]
    steps: list[tuple[float, float]]
    """Loss and gradient norm of each."""
    first_step: float | None
    """Unix time at which it was done."""


def outcome(run_dir: Path, ended: Ended, commands: Commands) -> Outcome:
    """Of `meshrunner run` with this run directory. A refused run has none."""
    status = read_json(run_dir / STATUS)
    if ended.code is None or (ended.code and commands.over):
        state: State = "not run" if commands.over else "failed"
        reason = "stopped with the bench" if commands.over else f"it had not ended after {commands.limit:.0f} s"
        return Outcome(state, reason, _log(run_dir, ended), {}, [], None)
    if ended.code == 2 and not status:
        return Outcome("refused", said(ended.log), "", {}, [], None)
    rows = read_events(run_dir)
    steps = [(row["train/loss"], row["train/grad_norm"]) for row in rows]
    first = rows[0]["time"] if rows else None
    summary = read_json(run_dir / SUMMARY)
    if ended.code == 0 and status.get("state") == "completed":
        return Outcome("works", "", "", summary, steps, first)
    reason = status.get("reason") or said(ended.log) or f"exit status {ended.code}"
    reason = f"{status.get('state', 'failed')}: {reason}"
    return Outcome("failed", reason, _log(run_dir, ended), summary, steps, first)


def said(log: Path) -> str:
    """The last paragraph of what a command printed, in a line."""
    lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not line.endswith(" ...")]
    begin = max((number for number, line in enumerate(lines) if not line.strip()), default=-1)
    return " ".join(" ".join(lines[begin + 1 :][-PARAGRAPH:]).split())[:600]


def _log(run_dir: Path, ended: Ended) -> str:
    """The file that says most of a failure."""
    worker = rank_log(run_dir, read_json(run_dir / ERROR).get("rank") or 0)
    return shown(worker if worker.exists() and worker.stat().st_size else ended.log)


def shown(path: Path) -> str:
    """A path as short as it is understood here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)

"""Run commands with a time limit, and read the outcome of a run: its final state, summary, losses and gradient norms."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.results import State
from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.files import ERROR, STATUS, SUMMARY, rank_log
from meshrunner.runner.rundir.records import JsonFile

REPOSITORY = Path(__file__).parents[2]
PARAGRAPH = 30
"""Maximum number of lines that a message quotes from the end of a command's output."""
MESHRUNNER = (sys.executable, "-m", "meshrunner")
"""Command that starts meshrunner. It also works if meshrunner is only on PYTHONPATH, without an installed console script."""


class Ended(NamedTuple):
    """A command that has ended."""

    code: int | None
    """Exit status; None if the bench stopped the command at its time limit or at the deadline."""
    log: Path
    """File with the command's output."""
    begin: float
    """Unix time at which the command started."""
    seconds: float


@dataclass
class Commands:
    """Runner of commands. All commands have the same deadline, and write their logs to the same folder."""

    folder: Path
    until: float
    """Deadline of the bench, as a value of `clock`."""
    limit: float
    """Time limit of each command, in seconds. A command that takes longer is stopped, because it seems to hang."""
    clock: Callable[[], float] = time.monotonic
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self, name: str, *command: str, **environment: str) -> Ended:
        """Run a command, and stop it if it reaches `limit` or the deadline. Append its output to NAME.log."""
        begin, clock = time.time(), self.clock()
        log = self.folder / f"{name}.log"
        # Each call of the bench has its own cache, so that the first run starts with an empty cache.
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
        return Ended(code, log, begin, self.clock() - clock)

    def meshrunner(self, name: str, *arguments: str, **environment: str) -> Ended:
        return self.run(name, *MESHRUNNER, *arguments, **environment)

    def stop(self) -> None:
        """Terminate the commands that are running. Move the deadline to the past, so that the bench starts no further row."""
        self.until = 0.0
        for process in [*self.running]:
            _stop(process)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.until - self.clock()

    @property
    def over(self) -> bool:
        return self.left <= 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a command if it is still running. Kill it if it does not end within 10 s."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Outcome(NamedTuple):
    """The outcome of a run: its state, summary and metrics of each step, and the reason and the log of a failure."""

    state: State
    reason: str
    log: str
    summary: dict[str, Any]
    steps: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    first_step: float | None
    """Unix time at which the first step ended; None if the run completed no step."""


def outcome(run_dir: Path, ended: Ended, commands: Commands) -> Outcome:
    """Read the outcome of a `meshrunner run` from its run directory. If meshrunner refused the run, there is no directory."""
    status = JsonFile.read(run_dir / STATUS).as_json()
    if ended.code is None or (ended.code and commands.over):
        state: State = "not run" if commands.over else "failed"
        reason = "stopped at the end of the bench" if commands.over else f"timed out after {commands.limit:.0f} s"
        return Outcome(state, reason, _log(run_dir, ended), {}, [], None)
    if ended.code == 2 and not status:
        return Outcome("refused", said(ended.log), "", {}, [], None)
    rows = read_events(run_dir)
    steps = [(row["train/loss"], row["train/grad_norm"]) for row in rows]
    first = rows[0]["time"] if rows else None
    summary = JsonFile.read(run_dir / SUMMARY).as_json()
    if ended.code == 0 and status.get("state") == "completed":
        return Outcome("works", "", "", summary, steps, first)
    reason = status.get("reason") or said(ended.log) or f"exit status {ended.code}"
    reason = f"{status.get('state', 'failed')}: {reason}"
    return Outcome("failed", reason, _log(run_dir, ended), summary, steps, first)


def overridden(words: list[str]) -> list[str]:
    """Remove each override whose key is set again by a later override."""
    return list({word.partition("=")[0]: word for word in words}.values())


def said(log: Path) -> str:
    """Return the last paragraph of a command's output as one line of at most 600 characters."""
    lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not line.endswith(" ...")]
    begin = max((number for number, line in enumerate(lines) if not line.strip()), default=-1)
    return " ".join(" ".join(lines[begin + 1 :][-PARAGRAPH:]).split())[:600]


def _log(run_dir: Path, ended: Ended) -> str:
    """Return the path of the failed rank's log, or of the command's log if the rank wrote nothing."""
    worker = rank_log(run_dir, JsonFile.read(run_dir / ERROR).as_json().get("rank") or 0)
    return shown(worker if worker.exists() and worker.stat().st_size else ended.log)


def shown(path: Path) -> str:
    """Shorten a path inside the current directory to a relative path. Return any other path unchanged."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)

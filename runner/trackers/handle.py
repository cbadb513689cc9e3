"""The launcher's handles of tracker processes: `Trackers.start(folder, tracker)`, then `finish_or_warn(...)`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.console import warn
from meshrunner.runner.process.forkserver import END_SIGNAL, context
from meshrunner.runner.process.temporary import temporary_folder
from meshrunner.runner.process.tree import descendants, kill
from meshrunner.runner.rundir.files import LOGS, is_sweep, tracker_log
from meshrunner.runner.trackers import follow
from meshrunner.runner.trackers.base import Tracker, ensure_run_id, read_tracking, update_tracking

TRACKER_GRACE_S = 2.0
"""Seconds from END_SIGNAL to SIGKILL, for a hung tracker."""


class TrackerHandle:
    """A tracker process for a run, or for a sweep's table. It cannot raise into the launcher, nor outlive it."""

    def __init__(self, folder: Path, tracker: Tracker, member: str, timeout_s: float) -> None:
        self._folder = folder
        self._subject = "sweep" if is_sweep(folder) else "run"
        self._tracker = tracker
        self._member = member
        self._timeout_s = timeout_s
        self._process: ForkServerProcess | None = None
        self._end_of_run: Connection | None = None
        self._deadline = 0.0
        self._problem: str | None = None
        self._temporary = ""
        """The folder for the temporary files of the tracker's library, which removes none when its process is ended."""

    @classmethod
    def start(cls, folder: Path, tracker: Tracker, member: str = "", timeout_s: float | None = None) -> TrackerHandle:
        """
        Start the tracker of a claimed run (it reads `attempt`), or of a sweep that has ended. Never raises.

        Args:
            member: its name where there are several.
            timeout_s: of `finish`; None: the tracker's own.
        """
        handle = cls(folder, tracker, member, tracker.finish_timeout_s if timeout_s is None else timeout_s)
        if tracker.compares if handle._subject == "sweep" else tracker.active:
            try:
                handle._start()
            except Exception as error:
                handle._problem = f"could not be started ({type(error).__name__}: {error})"
        return handle

    def _start(self) -> None:
        (self._folder / LOGS).mkdir(exist_ok=True)
        update_tracking(self._folder, self._member, phase="starting", warning=None)
        ensure_run_id(self._folder)  # here: several trackers share it
        ended, self._end_of_run = context.Pipe(duplex=False)
        self._temporary = tempfile.mkdtemp(prefix="tracker-", dir=temporary_folder())
        environment = os.environ | {"TMPDIR": self._temporary}
        arguments = (str(self._folder), self._member, ended, environment, list(sys.path))
        # A daemon: a launcher that exits without `finish` terminates it, rather than wait for it.
        process = context.Process(target=follow.main, args=arguments, daemon=True, name="tracker")
        process.start()
        ended.close()
        self._process = process

    @property
    def pid(self) -> int | None:
        """Process id of the tracker; None when it has none or has finished."""
        return self._process.pid if self._process else None

    def end(self) -> None:
        """Tell the tracker that the run has ended. status.json, events.jsonl and summary.json must be complete."""
        if self._end_of_run is not None:
            self._end_of_run.close()
            self._end_of_run = None
            self._deadline = time.monotonic() + self._timeout_s

    def finish(self) -> str | None:
        """
        Wait for the tracker, `timeout_s` after `end` at most, and end it.

        Returns:
            A warning for the user; None if the tracker finished.
        """
        self.end()
        if self._process is not None:
            try:
                self._process.join(max(0.0, self._deadline - time.monotonic()))
                self._problem = self._find_problem(self._process)
            finally:
                self.stop()  # after Ctrl-C, too
        if self._problem is None:
            return None
        again = " ".join([f"python -m {follow.__name__}", str(self._folder), self._member]).rstrip()
        return (
            f"tracker {self._tracker.kind} {self._problem}; the {self._subject} is not affected "
            f"(log: {tracker_log(self._folder, self._member)}; again: {again})"
        )

    def stop(self) -> None:
        """End the tracker process, if there is one, without waiting for it to finish."""
        if self._process is not None:
            self._terminate(self._process)
            self._process = None
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _find_problem(self, process: ForkServerProcess) -> str | None:
        tracking = read_tracking(self._folder, self._member)
        phase, code = tracking.phase, process.exitcode
        if code is None:
            verb = "start" if phase in ("starting", "opening") else "finish"
            return f"did not {verb} within {self._timeout_s:g} s of the {self._subject}'s end and was killed"
        if code < 0:
            killer = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            return f"was killed by {killer} while {phase}"
        if code == 0 and phase == "finished":
            return None
        return f"failed ({tracking.warning or f'exit code {code}'})"

    @staticmethod
    def _terminate(process: ForkServerProcess) -> None:
        """End a tracker that still runs, and its descendants; takes 2 x TRACKER_GRACE_S at most."""
        if process.is_alive():
            own = descendants(process.pid) if process.pid else []
            if process.pid is not None:
                os.kill(process.pid, END_SIGNAL)
            process.join(TRACKER_GRACE_S)
            process.kill()
            for each in own:
                kill(each)
        process.join(TRACKER_GRACE_S)
        if not process.is_alive():  # else it is in uninterruptible sleep, and dies after that
            process.close()


class Trackers:
    """The tracker processes of a run, or for a sweep's table: one for each member of its tracker."""

    def __init__(self, handles: list[TrackerHandle]) -> None:
        self.handles = handles

    @classmethod
    def start(cls, folder: Path, tracker: Tracker) -> Trackers:
        """Start them, as `TrackerHandle.start` does. Never raises."""
        limits = {name: min(each.finish_timeout_s, tracker.finish_timeout_s) for name, each in tracker.members.items()}
        return cls([TrackerHandle.start(folder, each, name, limits[name]) for name, each in tracker.members.items()])

    def finish_or_warn(self, ended: str) -> None:
        """Wait for all of them at once and print their warnings. `ended` is the message for a user who interrupts the wait."""
        try:
            for handle in self.handles:
                handle.end()
            warnings = [warning for handle in self.handles if (warning := handle.finish())]
        except Interrupted:
            warnings = [f"{ended}; its tracker was not waited for"]
        finally:
            for handle in self.handles:
                handle.stop()
        for warning in warnings:
            warn(warning)

"""The launcher's handle of the tracker process: `TrackerHandle.start(folder, tracker)`, then `finish()`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.console import warn
from meshrunner.runner.process.forkserver import END_SIGNAL, context
from meshrunner.runner.process.temporary import temporary_folder
from meshrunner.runner.process.tree import descendants, kill
from meshrunner.runner.rundir.files import LOGS, TRACKER_LOG, is_sweep
from meshrunner.runner.trackers import process as tracker_process
from meshrunner.runner.trackers.base import Tracker, read_tracking, update_tracking

TRACKER_GRACE_S = 2.0
"""Seconds from END_SIGNAL to SIGKILL, for a hung tracker."""


class TrackerHandle:
    """A tracker process for a run, or for a sweep's table. It cannot raise into the launcher, nor outlive it."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self._folder = folder
        self._subject = "sweep" if is_sweep(folder) else "run"
        self._tracker = tracker
        self._process: ForkServerProcess | None = None
        self._end_of_run: Connection | None = None
        self._problem: str | None = None
        self._temporary = ""
        """The folder for the temporary files of the tracker's library, which removes none when its process is ended."""

    @classmethod
    def start(cls, folder: Path, tracker: Tracker) -> TrackerHandle:
        """Start the tracker of a claimed run (it reads `attempt`), or of a sweep that has ended. Never raises."""
        handle = cls(folder, tracker)
        if tracker.compares if handle._subject == "sweep" else tracker.active:
            try:
                handle._start()
            except Exception as error:
                handle._problem = f"could not be started ({type(error).__name__}: {error})"
        return handle

    def _start(self) -> None:
        (self._folder / LOGS).mkdir(exist_ok=True)
        update_tracking(self._folder, phase="starting", warning=None)
        ended, self._end_of_run = context.Pipe(duplex=False)
        self._temporary = tempfile.mkdtemp(prefix="tracker-", dir=temporary_folder())
        arguments = (str(self._folder), ended, os.environ | {"TMPDIR": self._temporary}, list(sys.path))
        # A daemon: a launcher that exits without `finish` terminates it, rather than wait for it.
        process = context.Process(target=tracker_process.main, args=arguments, daemon=True, name="tracker")
        process.start()
        ended.close()
        self._process = process

    @property
    def pid(self) -> int | None:
        """Process id of the tracker; None when it has none or has finished."""
        return self._process.pid if self._process else None

    def finish(self) -> str | None:
        """
        Wait for the tracker, `finish_timeout_s` at most, and end it. status.json, events.jsonl and summary.json must be complete.

        Returns:
            A warning for the user; None if the tracker finished.
        """
        if self._process is not None:
            try:
                assert self._end_of_run is not None
                self._end_of_run.close()
                self._process.join(self._tracker.finish_timeout_s)
                self._problem = self._find_problem(self._process)
            finally:
                self._terminate(self._process)  # after Ctrl-C, too
                self._process = None
                shutil.rmtree(self._temporary, ignore_errors=True)
        if self._problem is None:
            return None
        return (
            f"tracker {self._tracker.kind} {self._problem}; the {self._subject} is not affected "
            f"(log: {self._folder / TRACKER_LOG}; again: python -m meshrunner.runner.trackers.process {self._folder})"
        )

    def finish_or_warn(self, ended: str) -> None:
        """Call `finish` and print its warning. `ended` is the message for a user who interrupts the wait."""
        try:
            warning = self.finish()
        except Interrupted:
            warning = f"{ended}; its tracker was not waited for"
        if warning is not None:
            warn(warning)

    def _find_problem(self, process: ForkServerProcess) -> str | None:
        tracking = read_tracking(self._folder)
        phase, code = tracking.get("phase"), process.exitcode
        if code is None:
            verb = "start" if phase in ("starting", "opening") else "finish"
            limit = self._tracker.finish_timeout_s
            return f"did not {verb} within {limit:g} s of the {self._subject}'s end and was killed"
        if code < 0:
            killer = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            return f"was killed by {killer} while {phase}"
        if code == 0 and phase == "finished":
            return None
        return f"failed ({tracking.get('warning') or f'exit code {code}'})"

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

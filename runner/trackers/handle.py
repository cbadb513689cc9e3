"""The tracker's process as the launching process sees it: `TrackerHandle.start(folder, tracker)`, then `finish()`."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.console import warn
from meshrunner.runner.process.forkserver import END, context
from meshrunner.runner.process.tree import descendants, kill
from meshrunner.runner.rundir.files import LOGS, is_sweep, tracker_log
from meshrunner.runner.trackers import process as tracker_process
from meshrunner.runner.trackers.base import Tracker, read_tracking, update_tracking

GRACE_S = 2.0
"""Seconds from the signal that writes the stack of a hung tracker to its log, to SIGKILL."""


class TrackerHandle:
    """A tracker at work on a run, or on a sweep's table. Nothing it does can raise into, or outlive, the launching process."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self._folder = folder
        self._what = "sweep" if is_sweep(folder) else "run"
        self._tracker = tracker
        self._process: ForkServerProcess | None = None
        self._end_of_run: Connection | None = None
        self._problem: str | None = None

    @classmethod
    def start(cls, folder: Path, tracker: Tracker) -> TrackerHandle:
        """Start the tracker of a run that was claimed (its `attempt` counts), or of a sweep that has ended. Never raises."""
        handle = cls(folder, tracker)
        if tracker.compares if handle._what == "sweep" else tracker.active:
            try:
                handle._start()
            except Exception as error:
                handle._problem = f"could not be started ({type(error).__name__}: {error})"
        return handle

    def _start(self) -> None:
        (self._folder / LOGS).mkdir(exist_ok=True)
        update_tracking(self._folder, phase="starting", warning=None)
        ended, self._end_of_run = context.Pipe(duplex=False)
        arguments = (str(self._folder), ended, dict(os.environ), list(sys.path))
        # A daemon: a launching process that ends without `finish` ends it, rather than wait for it.
        process = context.Process(target=tracker_process.main, args=arguments, daemon=True, name="tracker")
        process.start()
        ended.close()
        self._process = process

    @property
    def pid(self) -> int | None:
        """The tracker's process; None when there is none (any more)."""
        return self._process.pid if self._process else None

    def finish(self) -> str | None:
        """
        Wait for the tracker, `finish_timeout_s` at most, and end it. Call it when status.json, events.jsonl and
        summary.json are complete.

        Returns:
            A warning for the user, one sentence; None if all went well.
        """
        if self._process is not None:
            try:
                assert self._end_of_run is not None
                self._end_of_run.close()
                self._process.join(self._tracker.finish_timeout_s)
                self._problem = self._verdict(self._process)
            finally:
                self._end(self._process)  # after Ctrl-C, too
                self._process = None
        if self._problem is None:
            return None
        return (
            f"tracker {self._tracker.kind} {self._problem}; the {self._what} is not affected "
            f"(log: {tracker_log(self._folder)}; again: python -m meshrunner.runner.trackers.process {self._folder})"
        )

    def finish_or_warn(self, ended: str) -> None:
        """`finish`, with its warning on stderr. `ended` says what is complete, for a user who does not wait any longer."""
        try:
            warning = self.finish()
        except Interrupted:
            warning = f"{ended}; its tracker was not waited for"
        if warning is not None:
            warn(warning)

    def _verdict(self, process: ForkServerProcess) -> str | None:
        tracking = read_tracking(self._folder)
        phase, code = tracking.get("phase"), process.exitcode
        if code is None and phase in ("starting", "opening"):
            return f"did not start, given {self._tracker.finish_timeout_s:g} s after the {self._what}'s end, and was killed"
        if code is None:
            return (
                f"did not finish within {self._tracker.finish_timeout_s:g} s of the {self._what}'s end and was killed"
            )
        if code < 0:
            killer = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            return f"was killed by {killer} while {phase}"
        if code == 0 and phase == "finished":
            return None
        return f"failed ({tracking.get('warning') or f'exit code {code}'})"

    @staticmethod
    def _end(process: ForkServerProcess) -> None:
        """End a tracker that is still there, with all that it started; takes 2 x GRACE_S at most."""
        if process.is_alive():
            own = descendants(process.pid) if process.pid else []
            if process.pid is not None:
                os.kill(process.pid, END)
            process.join(GRACE_S)
            process.kill()
            for each in own:
                kill(each)
        process.join(GRACE_S)
        if not process.is_alive():  # else it is stuck inside the kernel, and dies when that lets go of it
            process.close()

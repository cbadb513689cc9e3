"""Starts and stops tracker processes: `Trackers(folder, tracker)` starts them and `finish_or_warn(...)` waits for them."""

import math
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.console import warn
from meshrunner.runner.process.forkserver import END_SIGNAL, child, context, temporary_folder
from meshrunner.runner.process.tree import descendants, kill
from meshrunner.runner.rundir import Tracking
from meshrunner.runner.rundir.files import LOGS, is_sweep, tracker_log, tracking
from meshrunner.runner.trackers import follow
from meshrunner.runner.trackers.base import Tracker
from meshrunner.runner.trackers.description import ensure_run_id, update_tracking

TRACKER_GRACE_S = 2.0
"""Seconds between END_SIGNAL and SIGKILL, in which a tracker process can exit."""


class TrackerHandle:
    """A tracker's process for a run or an ended sweep. It ends when the launcher ends, but cannot crash the launcher."""

    def __init__(self, folder: Path, tracker: Tracker, member: str = "", limit_s: float = math.inf) -> None:
        """Start the process if the tracker is active. If `folder` is a sweep, the tracker must also be able to record sweeps.
        `finish` reports a failed start."""
        self._folder, self._tracker, self._member = folder, tracker, member
        self._subject = "sweep" if is_sweep(folder) else "run"
        self._timeout_s = min(tracker.finish_timeout_s, limit_s)
        self.process: ForkServerProcess | None = None
        self._end_of_run: Connection | None = None
        self._deadline = 0.0
        self._problem: str | None = None
        tracks = self._subject == "run" or type(tracker).compare is not Tracker.compare
        if tracks and tracker.active:
            try:
                self._start()
            except Exception as error:
                self._problem = f"could not be started ({type(error).__name__}: {error})"

    def _start(self) -> None:
        (self._folder / LOGS).mkdir(exist_ok=True)
        update_tracking(self._folder, self._member, phase="starting", warning=None)
        ensure_run_id(self._folder)  # do this here: several tracker processes would write different ids
        ended, self._end_of_run = context.Pipe(duplex=False)
        environment = os.environ | {"TMPDIR": temporary_folder()}  # a killed W&B leaves files there
        log, arguments = tracker_log(self._folder, self._member), (self._folder, ended, self._member)
        # A launcher that exits without `finish` terminates a daemon instead of waiting for it.
        process = child(log, environment, follow.run_tracker, *arguments, daemon=True, name="tracker")
        process.start()
        self.process = process
        ended.close()

    def end(self) -> None:
        """Tell the tracker that the run has ended. The run's status.json, events.jsonl and summary.json must be complete."""
        if self._end_of_run is not None:
            self._end_of_run.close()
            self._end_of_run = None
            self._deadline = time.monotonic() + self._timeout_s

    def finish(self) -> str | None:
        """Wait for the tracker, at most `finish_timeout_s` seconds after the call of `end`. Return a warning or None."""
        self.end()
        if self.process is not None:
            self.process.join(max(0.0, self._deadline - time.monotonic()))
            self._problem = self._find_problem(self.process.exitcode)
            self.stop()
        if self._problem is None:
            return None
        again = " ".join([f"python -m {follow.__name__}", str(self._folder), self._member]).rstrip()
        return (
            f"tracker {self._tracker.kind} {self._problem}; the {self._subject} is not affected "
            f"(log: {tracker_log(self._folder, self._member)}; to track the {self._subject} again: {again})"
        )

    def _find_problem(self, code: int | None) -> str | None:
        found = Tracking.read(tracking(self._folder, self._member))
        phase = found.phase
        if code is None:
            verb = "start" if phase in ("starting", "opening") else "finish"
            return f"did not {verb} within {self._timeout_s:g} s of the {self._subject}'s end and was killed"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name} in phase '{phase}'"
        if code == 0 and phase == "finished":
            return None
        return f"failed ({found.warning or f'exit code {code}'})"

    def stop(self) -> None:
        """End the tracker process and its descendants within 2 x TRACKER_GRACE_S seconds."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.is_alive() and process.pid is not None:
            own = descendants(process.pid)
            os.kill(process.pid, END_SIGNAL)
            process.join(TRACKER_GRACE_S)
            process.kill()
            for each in own:
                kill(each)
        process.join(TRACKER_GRACE_S)
        if not process.is_alive():  # a process that is still alive is in uninterruptible sleep and dies later
            process.close()


class Trackers:
    """The tracker processes of a run or ended sweep, one per active tracker."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        limit_s = tracker.finish_timeout_s
        self.handles = [TrackerHandle(folder, each, name, limit_s) for name, each in tracker.members.items()]

    def finish_or_warn(self, ended: str) -> None:
        """Wait for all trackers and print their warnings. On Ctrl-C, print a single warning instead, with the prefix `ended`."""
        try:
            for handle in self.handles:
                handle.end()
            warnings = [warning for handle in self.handles if (warning := handle.finish())]
        except Interrupted:
            warnings = [f"{ended}; no longer waiting for its tracker"]
        finally:  # even after Ctrl-C
            for handle in self.handles:
                handle.stop()
        for warning in warnings:
            warn(warning)

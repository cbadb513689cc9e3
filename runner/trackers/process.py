"""What the tracker's process does: tail `events.jsonl` into the tracker until the run has its final state.

It needs the run directory and nothing else, so it works on a run that ended long ago, too, and on the table of a sweep:

    python -m meshrunner.runner.trackers.process RUN_DIR
    python -m meshrunner.runner.trackers.process SWEEP_DIR
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from meshrunner.runner.process import forkserver
from meshrunner.runner.rundir.events import StepRow, Tail
from meshrunner.runner.rundir.files import EVENTS, SUMMARY, is_run, is_sweep, read_json, tracker_log
from meshrunner.runner.rundir.states import FINAL, read_status
from meshrunner.runner.trackers.base import RunRecord, SweepRecord, tracker_of, update_tracking

POLL_S = 0.5
LOWEST_PRIORITY = 19


class Rows:
    """
    The rows of a run that is going on, each step once.

    A resumed run repeats the steps after its checkpoint, and the last row of a step is the one that counts. So rows of
    earlier attempts are held back until this attempt has passed their step, or the run is over.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._tail = Tail(run_dir / EVENTS)
        self._attempt = attempt
        self._held: dict[int, StepRow] = {}
        self._passed = 0
        """The last step of this attempt."""

    def read(self, final: bool) -> list[StepRow]:
        """What is certain by now and was not handed out before, ordered by step; all there is when `final`."""
        for row in self._tail.read():
            self._held[row["step"]] = row
            if int(row.get("attempt") or 1) >= self._attempt:
                self._passed = max(self._passed, row["step"])
        certain = sorted(step for step in self._held if final or step <= self._passed)
        return [self._held.pop(step) for step in certain]


def track_run(run_dir: Path, ended: Connection | None = None) -> None:
    """
    Feed a run's tracker; returns when the run is over and the tracker has finished.

    Args:
        ended: becomes readable when the run directory is complete; None: it is as soon as the run's state is final.

    Raises:
        Exception: whatever the tracker raises.
    """
    update_tracking(run_dir, phase="opening", warning=None)
    run = RunRecord.load(run_dir)
    rows = Rows(run.run_dir, run.attempt)
    sink = tracker_of(run).open(run)
    update_tracking(run_dir, phase="following")
    over = False
    while not over:
        over = _wait(run_dir, ended)  # before the rows are read, so that none comes after the last look
        for row in rows.read(final=over):
            sink.log(row)
    update_tracking(run_dir, phase="finishing")
    status = read_status(run_dir)
    sink.finish(read_json(run_dir / SUMMARY), str(status.get("state")), str(status.get("reason") or ""))
    update_tracking(run_dir, phase="finished")


def track_sweep(sweep_dir: Path) -> None:
    """Feed a sweep's tracker with the table of its runs; raises whatever the tracker raises."""
    update_tracking(sweep_dir, phase="opening", warning=None)
    sweep = SweepRecord.load(sweep_dir)
    update_tracking(sweep_dir, phase="finishing")
    tracker_of(sweep).compare(sweep)
    update_tracking(sweep_dir, phase="finished")


def _wait(run_dir: Path, ended: Connection | None) -> bool:
    """Wait until the next look at the disk; returns whether it is the last one."""
    if ended is not None:
        return ended.poll(POLL_S)
    if read_status(run_dir).get("state") in FINAL:
        return True
    time.sleep(POLL_S)
    return False


def main(folder: str, ended: Connection | None, environment: dict[str, str], path: list[str]) -> None:
    """The process that `Following.start` starts."""
    forkserver.enter(tracker_log(Path(folder)), environment, path)
    os.nice(LOWEST_PRIORITY)  # the training is what is measured
    code = guarded(Path(folder), ended)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a tracker's threads and exit handlers have no say in when this ends


def guarded(folder: Path, ended: Connection | None = None) -> int:
    """
    `track_run` or `track_sweep`, with whatever goes wrong as a traceback on stderr and a line in tracker.json.

    Returns:
        The exit code.
    """
    try:
        if is_sweep(folder):
            track_sweep(folder)
        else:
            track_run(folder, ended)
    except BaseException as error:  # SystemExit of a tracker, too
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        with suppress(OSError):
            update_tracking(folder, warning=": ".join([type(error).__name__, *lines[:1]]))
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (is_run(Path(sys.argv[1])) or is_sweep(Path(sys.argv[1]))):
        sys.exit("usage: python -m meshrunner.runner.trackers.process RUN_DIR or SWEEP_DIR")
    sys.exit(guarded(Path(sys.argv[1])))

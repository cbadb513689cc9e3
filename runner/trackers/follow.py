"""The tracker process: passes the rows of `events.jsonl` to a tracker until the run has ended.

The process reads only the directory of a run or sweep. The command below therefore also works after the run or sweep has ended,
for example to repeat failed tracking. MEMBER names one of several trackers. Without MEMBER, all trackers are used.

    python -m meshrunner.runner.trackers.follow RUN_OR_SWEEP_DIR [MEMBER]
"""

import os
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from meshrunner.runner.rundir import FINAL, StepRow, Summary, Tail, add_rows, read_state, read_status
from meshrunner.runner.rundir.files import EVALS, SUMMARY, is_run, is_sweep
from meshrunner.runner.trackers.base import Tracker, tracker_of
from meshrunner.runner.trackers.description import RunRecord, SweepRecord, update_tracking

POLL_S = 0.5


class RowBuffer:
    """A buffer that returns exactly one row for each step of a run in progress. A resumed run repeats the steps after its
    checkpoint, and only the last row written for a step is valid. The buffer therefore holds back the rows of earlier attempts
    until the current attempt has its first row or the run has ended."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._tail, self._eval_tail = Tail(run_dir), Tail(run_dir, EVALS)
        self._attempt = attempt
        self._held: list[StepRow] = []
        self._evals: list[StepRow] = []
        self._last = StepRow(step=0, attempt=1)
        """The last row of events.jsonl that `read` has returned."""

    def read(self, final: bool) -> list[StepRow]:
        """Return the new rows that no later row can replace, sorted by step. If `final` is set, return all remaining rows. A row
        of evals.jsonl follows the row of its step."""
        add_rows(self._held, self._tail.read())
        # Read evals.jsonl after events.jsonl: a run writes the evaluation of a step before the row of the next step.
        add_rows(self._evals, self._eval_tail.read())
        if not final and self._held and self._held[-1].attempt < self._attempt:
            return []
        ready, self._held = self._held, []
        self._last = ready[-1] if ready else self._last
        attempts = {row.step: row.attempt for row in (*ready, self._last)}
        due = [row for row in self._evals if final or row.step <= self._last.step]
        self._evals = [row for row in self._evals if row not in due]
        ready += [row for row in due if row.attempt >= attempts.get(row.step, 0)]
        return sorted(ready, key=lambda row: row.step)


def run_tracker(folder: Path, ended: Connection | None = None, member: str = "") -> int:
    """Track a run until it has ended, or record the table of an ended sweep. Return the exit code. If the tracker raises an
    exception, print the exception to stderr and record it in tracker.json. `ended`: a pipe that the launcher closes when the
    run has ended. Without a pipe, watch the state in status.json."""
    if ended is not None:
        os.nice(19)  # the lowest priority, so that the tracker does not slow the measured training
    try:
        update_tracking(folder, member, phase="opening", warning=None)
        record = SweepRecord.load(folder) if is_sweep(folder) else RunRecord.load(folder)
        tracker = tracker_of(record).members[member]
        if isinstance(record, RunRecord) and tracker.active:
            _track_run(record, tracker, ended, member)
        elif isinstance(record, SweepRecord):
            update_tracking(folder, member, phase="finishing")
            tracker.compare(record)
        update_tracking(folder, member, phase="finished")
    except BaseException as error:  # including a tracker's SystemExit
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        with suppress(OSError):
            update_tracking(folder, member, warning=": ".join([type(error).__name__, *lines[:1]]))
        return 1
    return 0


def _track_run(run: RunRecord, tracker: Tracker, ended: Connection | None, member: str) -> None:
    run_dir, rows, sink = run.run_dir, RowBuffer(run.run_dir, run.attempt), tracker.open(run)
    update_tracking(run_dir, member, phase="following")
    complete = False
    while not complete:
        if ended is not None:
            complete = ended.poll(POLL_S)
        elif not (complete := read_state(run_dir) in FINAL):
            time.sleep(POLL_S)
        for row in rows.read(final=complete):  # read after setting `complete`, so that no row is missed
            sink.log(row)
    update_tracking(run_dir, member, phase="finishing")
    status = read_status(run_dir)
    sink.finish(Summary.read(run_dir / SUMMARY).as_json(), str(status.state), status.reason)


def track_again(folder: Path, *members: str) -> int:
    """Track an ended run or sweep again with the trackers named in `members` (default: all trackers). Return the exit code."""
    record = SweepRecord.load(folder) if is_sweep(folder) else RunRecord.load(folder)
    return max(run_tracker(folder, member=member) for member in members or tracker_of(record).members)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not (is_run(Path(sys.argv[1])) or is_sweep(Path(sys.argv[1]))):
        sys.exit("usage: python -m meshrunner.runner.trackers.follow RUN_OR_SWEEP_DIR [MEMBER]")
    sys.exit(track_again(Path(sys.argv[1]), *sys.argv[2:]))

"""The live table of a sweep on a terminal. All states and figures are read from the run directories."""

import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from meshrunner.runner.compare.runs import Run, glance
from meshrunner.runner.console import one_line
from meshrunner.runner.figures import UNKNOWN
from meshrunner.runner.launch.progress import PROGRESS, RECENT, progress_cells, run_table
from meshrunner.runner.rundir import FINAL, StepRow, Tail, read_state
from meshrunner.runner.sweep.tally import Tally

REDRAW_S = 1.0
"""Seconds between redraws. A redraw takes milliseconds of CPU time and might slow a worker on the same core."""


class _Running:
    """A run that is executing, with the newest rows of its events.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.steps = glance(run_dir).config.get("steps")
        self.tail = Tail(run_dir)
        self.tail.read()  # skip the rows of earlier attempts
        self.rows: list[StepRow] = []

    def cells(self) -> list[str]:
        self.rows = [*self.rows, *self.tail.read()][-RECENT:]
        # A run that no process has claimed yet is starting.
        state = "running" if read_state(self.run_dir) == "running" else "starting"
        return [state, *progress_cells(state, self.steps, self.rows)]


class LiveTable(Tally):
    """Context manager that shows the live table. A redraw reads only the directories of executing runs, because a sweep may
    have many other runs."""

    # No refresh thread: one thread draws the table, forks processes and handles signals.

    steps = False

    def __init__(self, screen: Console, run_dirs: Sequence[Path], todo: Collection[Path]) -> None:
        """Prepare the table. The runs in `todo` will be executed: show them as pending, even if another state is recorded."""
        super().__init__(run_dirs, todo)
        self._screen = screen
        self._live = Live(
            console=screen,
            auto_refresh=False,
            transient=True,  # the comparison at the end replaces the live table
            vertical_overflow="crop",
            redirect_stderr=sys.stderr.isatty(),  # if stderr is a file, do not redirect it to the screen
        )
        self._phase = ""
        due = set(todo)
        self._states = {run_dir: "pending" if run_dir in due else read_state(run_dir) for run_dir in run_dirs}
        self._running: dict[Path, _Running] = {}
        self._ended: dict[Path, list[str]] = {}
        """Cells of ended runs, in the order in which the runs ended."""
        self._earlier = cache(lambda run_dir: _cells(glance(run_dir)))
        """Function that returns the cells of a run that had ended before the sweep started. It reads each run once."""
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def run_started(self, run_dir: Path) -> None:
        self._ended.pop(run_dir, None)
        self._running[run_dir] = _Running(run_dir)
        self._draw()

    def run_ended(self, run_dir: Path) -> None:
        """Show the recorded state of a run that has ended or that another process is executing."""
        run = self.ended(run_dir)
        self._running.pop(run_dir, None)
        self._phase = ""
        self._states[run_dir] = run.state
        self._ended[run_dir] = _cells(run)
        self._draw()

    def refresh(self, phase: str = "") -> None:
        """Redraw the table if it is older than REDRAW_S seconds or a new `phase` begins, such as saving a checkpoint."""
        begins = phase not in ("", self._phase)
        self._phase = phase
        if begins or time.monotonic() - self._drawn > REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        live = {run_dir: running.cells() for run_dir, running in self._running.items()}
        states = self._states | {run_dir: cells[0] for run_dir, cells in live.items()}
        width = self._screen.width
        counts = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
        current = next(iter(self._running), None)
        # Without a phase, an empty line keeps the table in place.
        phase = f"{self.whose(current)}{self._phase}" if self._phase and current else ""
        lines = ["", *map(one_line, [self.line, counts, phase])]
        below = [part for line in lines for part in Text(line).wrap(self._screen, width)]
        rows = []
        for run_dir in self._visible(len(below) - 1):
            cells = live.get(run_dir) or self._ended.get(run_dir)
            if cells is None and states[run_dir] in FINAL:
                cells = self._earlier(run_dir)
            rows.append([self.label(run_dir), *(cells or [states[run_dir], *(UNKNOWN for _ in PROGRESS[1:])])])
        self._live.update(Group(run_table(("run", *PROGRESS), rows, width), *below), refresh=True)

    def _visible(self, taken: int) -> list[Path]:
        """Return the runs to show. If not all fit on the screen, prefer executing runs. `taken`: lines that other text needs."""
        room = max(self._screen.height - 3 - taken, 1)  # 3: the table's titles, the rule below them, an empty line
        if len(self._states) <= room:
            return list(self._states)
        running = list(self._running)[:room]
        waiting = [run_dir for run_dir, state in self._states.items() if state == "pending" and run_dir not in running]
        ended = list(self._ended)
        room -= len(running)
        before = min(len(ended), max(room // 2, room - len(waiting)))
        return [*ended[len(ended) - before :], *running, *waiting[: room - before]]


def _cells(run: Run) -> list[str]:
    return [run.state, *progress_cells(run.state, run.config.get("steps"), run.events)]

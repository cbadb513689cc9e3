"""The live table of a sweep's runs on a terminal, read from their directories; none when piped."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from meshrunner.runner.compare.runs import read_run
from meshrunner.runner.console import console, one_line
from meshrunner.runner.figures import UNKNOWN
from meshrunner.runner.launch.progress import PROGRESS, RECENT, progress_cells, run_table
from meshrunner.runner.rundir import StepRow, Tail, read_state
from meshrunner.runner.rundir.files import EVENTS
from meshrunner.runner.sweep.tally import Tally

REDRAW_S = 1.0
"""Seconds between redraws: each takes milliseconds of a core that may be training."""
AROUND = 3
"""Lines of the screen beside runs and what stands below them: titles, rule, an empty one."""
STARTING = "starting"
"""Shown from the start of a run's process until the run is claimed."""


class _Running:
    """The newest rows of a run that is being executed."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.steps = read_run(run_dir).config.get("steps")
        self.tail = Tail(run_dir / EVENTS)
        self.tail.read()  # rows of earlier attempts
        self.rows: list[StepRow] = []

    def cells(self) -> list[str]:
        self.rows = [*self.rows, *self.tail.read()][-RECENT:]
        state = "running" if read_state(self.run_dir) == "running" else STARTING
        return [state, *progress_cells(state, self.steps, self.rows)]


class LiveTable:
    """
    The table, a context manager. Only running runs are read again: a sweep may have thousands of runs.

    Drawn by the caller's thread, because that forks and is interrupted by signals.
    """

    steps = False
    """Whether the steps of a run are printed meanwhile."""

    def __init__(self, run_dirs: Sequence[Path], todo: Collection[Path]) -> None:
        """todo: the runs to be executed, whatever their recorded state."""
        screen = console()
        self.active = screen.is_terminal and not screen.is_dumb_terminal
        self._screen = screen
        self._live = Live(
            console=screen,
            auto_refresh=False,
            transient=True,  # the comparison replaces it
            vertical_overflow="crop",
            redirect_stderr=sys.stderr.isatty(),  # else stderr is a file
        )
        shown = run_dirs if self.active else ()
        self._tally = Tally(run_dirs, todo) if self.active else None
        self._phase = ""
        self._states = {run_dir: "pending" if run_dir in todo else read_state(run_dir) for run_dir in shown}
        self._running: dict[Path, _Running] = {}
        self._ended: dict[Path, list[str]] = {}
        """Cells of the ended runs, in the order in which they ended."""
        self._drawn = 0.0

    def __enter__(self) -> LiveTable:
        if self.active:
            self._live.start()
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self._live.stop()

    def whose(self, run_dir: Path) -> str:
        """What a remark about a run begins with."""
        return f"{self._label(run_dir)}: "

    def _label(self, run_dir: Path) -> str:
        return self._tally.label(run_dir) if self._tally else run_dir.name

    def run_started(self, run_dir: Path) -> None:
        """Show a run as started."""
        if self.active:
            self._ended.pop(run_dir, None)
            self._running[run_dir] = _Running(run_dir)
            self._draw()

    def run_ended(self, run_dir: Path) -> None:
        """Show the final state of a run, or the state that another process gave it."""
        if self._tally:
            self._tally.ended(run_dir)
            self._running.pop(run_dir, None)
            self._phase = ""
            run = read_run(run_dir)
            self._states[run_dir] = run.state
            self._ended[run_dir] = [run.state, *progress_cells(run.state, run.config.get("steps"), run.events)]
            self._draw()

    def refresh(self, phase: str = "") -> None:
        """
        Redraw if it is time; call it a few times a second.

        Args:
            phase: what the one run that is executed does outside of steps. It is shown at once: what follows may block.
        """
        begins = phase not in ("", self._phase)
        self._phase = phase
        if self.active and (begins or time.monotonic() - self._drawn > REDRAW_S):
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        live = {run_dir: running.cells() for run_dir, running in self._running.items()}
        states = self._states | {run_dir: cells[0] for run_dir, cells in live.items()}
        width = self._screen.width
        below = [part for line in self._below(states) for part in Text(line).wrap(self._screen, width)]
        titles = ("run", *PROGRESS)
        unknown = [UNKNOWN] * (len(PROGRESS) - 1)
        rows = []
        for run_dir in self._visible(len(below) - 1):
            cells = live.get(run_dir) or self._ended.get(run_dir) or [states[run_dir], *unknown]
            rows.append([self._label(run_dir), *cells])
        self._live.update(Group(run_table(titles, rows, width), *below), refresh=True)

    def _below(self, states: dict[Path, str]) -> list[str]:
        """Return the lines below the table: how far the sweep is, how many runs are in which state, what takes place."""
        counts = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
        begun = next(iter(self._running), None)
        # The line is there without a phase, too: the table must not jump.
        phase = f"{self.whose(begun)}{self._phase}" if self._phase and begun else ""
        return ["", *map(one_line, [self._tally.line if self._tally else "", counts, phase])]

    def _visible(self, taken: int) -> list[Path]:
        """
        Return all runs; if the screen is too small, those that ended last, the running and the next ones.

        Args:
            taken: lines that other things need.
        """
        room = max(self._screen.height - AROUND - taken, 1)
        if len(self._states) <= room:
            return list(self._states)
        running = list(self._running)[:room]
        waiting = [run_dir for run_dir, state in self._states.items() if state == "pending" and run_dir not in running]
        ended = list(self._ended)
        room -= len(running)
        before = min(len(ended), max(room // 2, room - len(waiting)))
        return [*ended[len(ended) - before :], *running, *waiting[: room - before]]

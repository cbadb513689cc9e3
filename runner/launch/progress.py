"""How a run shows itself: one live line on a terminal, plain lines when piped, and what a sweep shows of several."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rich import box
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from meshrunner.runner.compare.table import BETWEEN, fitted
from meshrunner.runner.console import Slow, console, duration, one_line, say
from meshrunner.runner.figures import UNKNOWN, figure_of, number
from meshrunner.runner.rundir import StepRow, Tail, is_count
from meshrunner.runner.rundir.files import EVENTS

SPEED = figure_of("perf/wps")
PROGRESS = ("state", "step", "last WPS", "memory", "left")
"""Columns of a run that may be going on: the speed is that of its last step."""
YIELDING = ("last WPS", "median WPS", "memory")
"""Columns that a narrow terminal does without, the last first."""
NAME_ROOM, SHORTEST_NAME = 20, 8
"""Characters of a run's name: for so many other columns make room, and so many are shown in any case."""
LEAVING = ("norm", "mfu", "memory", "loss")
"""Parts of a run's live line that a narrow terminal does without, the first first."""
SPINNER = 2
"""Characters before a line in which something takes long."""
RECENT = 20
"""Last steps that the time left is judged by."""
LINE_EVERY_S = 1.0
"""Least time between two plain lines; the first and the last step always have theirs."""


class Display(Protocol):
    """Where a run that is executed is shown."""

    def whose(self, run_dir: Path) -> str:
        """What a remark about the run begins with; empty where only one is executed."""

    def refresh(self, phase: str) -> None:
        """
        Show how far the run is. Called a few times a second, and before what may take long.

        Args:
            phase: what takes place outside of steps (`recipes.meter.Phase`, or what the launcher does); empty in steps.
        """


class ProgressLine:
    """The Display of a single run: its newest row, or what happens meanwhile. A context manager."""

    def __init__(self, steps: int, run_dir: Path) -> None:
        """Rows that exist already are of earlier attempts."""
        self.steps = steps
        self.tail = Tail(run_dir / EVENTS)
        self.tail.read()
        self.slow = Slow()
        self.console = console()
        to_screen = sys.stderr.isatty()  # else stderr goes to a file, and there it is to stay
        live = Live(console=self.console, refresh_per_second=5, transient=True, redirect_stderr=to_screen)
        self.live = live if self.console.is_terminal else None
        self.printed = 0.0
        self.parts: dict[str, str] = {}
        """Of the newest row's line."""
        self.shown = ""
        """What stands on the terminal."""
        self.waiting: str | None = None
        self.recent: list[float] = []
        self.stack = ExitStack()

    def __enter__(self) -> ProgressLine:
        self.stack.enter_context(self.live or self.slow)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        if self.waiting is not None:
            say(self.waiting)

    def whose(self, run_dir: Path) -> str:
        return ""

    def refresh(self, phase: str) -> None:
        self.show(self.tail.read(), phase)

    def show(self, rows: list[StepRow], phase: str = "") -> None:
        """Show rows that are new since the last call, and what happens outside of steps."""
        if rows:
            self.recent = [*self.recent, *(row.get("perf/step_time_s") or 0.0 for row in rows)][-RECENT:]
            self.parts = self._parts(rows[-1])
        if self.live:
            self._update(self.live, phase)
            return
        self.slow.doing(phase)
        now = time.monotonic()
        if rows and (now - self.printed >= LINE_EVERY_S or rows[-1].step == self.steps):
            say("  ".join(self.parts.values()))
            self.printed, self.waiting = now, None
        elif rows:
            self.waiting = "  ".join(self.parts.values())

    def _update(self, live: Live, phase: str) -> None:
        """Show what fits on one line of the terminal: step, speed, time left and the phase in any case."""
        parts = self.parts | ({"phase": phase} if phase else {})
        for name in ("", *LEAVING):
            parts.pop(name, "")
            line = "  ".join(parts.values())
            if len(line) <= self.console.width - SPINNER:
                break
        if line != self.shown:  # a spinner begins anew with each update
            live.update(Spinner("line", Text(line)) if phase else Text(line))
            self.shown = line

    def _parts(self, row: StepRow) -> dict[str, str]:
        left = sum(self.recent) / len(self.recent) * (self.steps - row.step)
        return {
            "step": f"step {row.step}/{self.steps}",
            "loss": _titled("train/loss", row),
            "norm": _titled("train/grad_norm", row),
            "wps": f"{SPEED.text(row['perf/wps'])} WPS",
            "mfu": _titled("perf/mfu", row),
            "memory": memory_text(row),
            "left": f"{duration(left)} left" if row.step < self.steps else "done",
        }


def memory_text(row: Mapping[str, float | None]) -> str:
    """Return peak memory as a line shows it: reserved on a GPU, resident on a CPU."""
    reserved = figure_of("memory/peak_reserved_gib").cell([row])
    resident = figure_of("memory/peak_rss_gib").cell([row])
    return reserved or (f"{resident} host" if resident else UNKNOWN)


def _titled(key: str, row: StepRow) -> str:
    figure = figure_of(key)
    return f"{figure.title} {figure.text(row[key], 'unknown')}"


def run_table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """
    Return a table of runs for a terminal, a line each. The first column, their names, yields to the others, which are never cut.

    Where a name would have too little room, the columns of YIELDING lose what stands in parentheses, then their places.
    """
    columns = list(zip(titles, *(map(one_line, row) for row in rows), strict=True))
    wanted = min(NAME_ROOM, max(map(len, columns[0])))

    def room() -> int:
        return width - sum(max(map(len, column)) + BETWEEN for column in columns[1:])

    if room() < wanted:
        columns = [tuple(map(_brief, column)) if column[0] in YIELDING else column for column in columns]
    for title in reversed(YIELDING):
        if room() < wanted:
            columns = [column for column in columns if column[0] != title]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    names, *others = columns
    longest = max(room(), SHORTEST_NAME)
    table.add_column(names[0], max_width=longest, no_wrap=True)
    for column in others:
        table.add_column(column[0], width=max(map(len, column)), no_wrap=True)
    for name, *cells in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(Text, (fitted(name, longest), *cells)))
    return table


def _brief(cell: str) -> str:
    """`32.14 GiB` of `32.14 GiB (33.82%)`."""
    return cell.partition(" (")[0]


def progress_cells(state: str, steps: Any, rows: Sequence[StepRow]) -> tuple[str, str, str, str]:
    """
    Return the cells of PROGRESS after the state: what the newest step was like.

    Args:
        steps: as configured; anything but a number where that cannot be known.
        rows: the newest steps, RECENT of them or more.
    """
    if not rows:
        return f"0/{steps}" if is_count(steps) else UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN
    last, times = rows[-1], [time for row in rows[-RECENT:] if (time := number(row.get("perf/step_time_s")))]
    left = UNKNOWN
    if state == "running" and is_count(steps) and times:
        left = duration(median(times) * (steps - last.step))
    of = f"/{steps}" if is_count(steps) else ""
    return f"{last.step}{of}", SPEED.text(number(last.get(SPEED.key))), memory_text(last), left

"""How a run shows itself while it trains: one live line on a terminal, plain lines when piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.live import Live
from rich.text import Text

from meshrunner.runner.console import console, duration
from meshrunner.runner.figures import UNKNOWN, figure_of, number
from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.rundir.states import is_count

SPEED = figure_of("perf/wps")
PROGRESS = ("state", "step", "WPS of the last step", "memory", "left")
"""Columns of a run that may be going on; the figure that runs are compared by has its own title."""
RECENT = 20
"""Last steps that the time left is judged by."""
LINE_EVERY_S = 1.0
"""Least time between two plain lines; the first and the last step always have theirs."""


class ProgressLine:
    """Shows the newest row. Use as a context manager."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.console = console()
        to_screen = sys.stderr.isatty()  # else stderr goes to a file, and there it is to stay
        live = Live(console=self.console, refresh_per_second=5, transient=True, redirect_stderr=to_screen)
        self.live = live if self.console.is_terminal else None
        self.printed = 0.0
        self.waiting: str | None = None
        self.recent: list[float] = []

    def __enter__(self) -> ProgressLine:
        if self.live:
            self.live.start()
            self.live.update(Text("starting the workers"))
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()
        if self.waiting is not None:
            print(self.waiting, flush=True)

    def show(self, rows: list[StepRow]) -> None:
        """Show rows that are new since the last call."""
        if not rows:
            return
        self.recent = [*self.recent, *(row["perf/step_time_s"] for row in rows)][-RECENT:]
        line = self._line(rows[-1])
        if self.live:
            self.live.update(Text(line))
            return
        now = time.monotonic()
        if now - self.printed >= LINE_EVERY_S or rows[-1]["step"] == self.steps:
            print(line, flush=True)
            self.printed, self.waiting = now, None
        else:
            self.waiting = line

    def _line(self, row: StepRow) -> str:
        left = sum(self.recent) / len(self.recent) * (self.steps - row["step"])
        parts = [
            f"step {row['step']}/{self.steps}",
            _titled("train/loss", row),
            _titled("train/grad_norm", row),
            f"{SPEED.text(row['perf/wps'])} WPS",
            _titled("perf/mfu", row),
            memory_text(row),
            f"{duration(left)} left" if row["step"] < self.steps else "done",
        ]
        return "  ".join(parts)


def memory_text(row: StepRow) -> str:
    """Peak memory as a line shows it: reserved on a GPU, resident on a CPU."""
    reserved = figure_of("memory/peak_reserved_gib").cell([row])
    resident = figure_of("memory/peak_rss_gib").cell([row])
    return reserved or (f"{resident} host" if resident else UNKNOWN)


def _titled(key: str, row: StepRow) -> str:
    figure = figure_of(key)
    return f"{figure.title} {figure.text(row[key], 'unknown')}"


def progress_cells(state: str, steps: Any, rows: Sequence[StepRow]) -> tuple[str, str, str, str]:
    """
    The cells of PROGRESS after the state: what the newest step was like.

    Args:
        steps: as configured; anything but a number where that cannot be known.
        rows: the newest steps, RECENT of them or more.
    """
    if not rows:
        return f"0/{steps}" if is_count(steps) else UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN
    last = rows[-1]
    times = [time for row in rows[-RECENT:] if (time := number(row.get("perf/step_time_s")))]
    left = UNKNOWN
    if state == "running" and is_count(steps) and times:
        left = duration(median(times) * (steps - last["step"]))
    of = f"/{steps}" if is_count(steps) else ""
    return f"{last['step']}{of}", SPEED.text(number(last.get(SPEED.key))), memory_text(last), left

"""Show the progress of a run as a live line on a terminal, as plain lines in a pipe, or as cells of a sweep's live table."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from meshrunner.runner.compare.text_table import BETWEEN, fitted
from meshrunner.runner.console import Slow, console, duration, one_line, say
from meshrunner.runner.figures import UNKNOWN, figure_of, number
from meshrunner.runner.rundir import StepRow, Tail, is_count
from meshrunner.runner.rundir.files import EVALS

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

SPEED = figure_of("perf/wps")
PROGRESS = ("state", "step", "last WPS", "memory", "left")
"""Columns that show a run's progress in a table of runs. `last WPS` is the speed of the last step."""
YIELDING = ("last WPS", "median WPS", "memory")
"""Columns that `run_table` omits on a narrow terminal: first `memory`, then `median WPS`, then `last WPS`."""
NAME_ROOM, SHORTEST_NAME = 20, 8
"""Preferred and minimum width of run names in characters. `run_table` omits columns to reach the preferred width."""
LEAVING = ("norm", "mfu", "memory", "loss")
"""Parts of a run's live line that are omitted on a narrow terminal, in the order of omission."""
SPINNER = 2
"""Width of the spinner at the beginning of a line, in characters."""
RECENT = 20
"""Number of recent steps from which the remaining time is estimated."""
LINE_EVERY_S = 1.0
"""Minimum seconds between two plain progress lines. The first and the last step are always printed."""


class Display(Protocol):
    """The interface of objects that show the progress of a run while it is executed."""

    def whose(self, run_dir: Path) -> str:
        """Return the text to print before messages about the run, or an empty string if only one run is executed."""

    def refresh(self, phase: str) -> None:
        """Show the progress and `phase` (work outside of steps). Call this method a few times a second and before slow work."""


class ProgressLine:
    """The Display of a single run: a context manager that shows the newest row of events.jsonl and the current phase."""

    def __init__(self, steps: int, run_dir: Path) -> None:
        """Skip the rows that are already in events.jsonl, because an earlier execution of the run wrote them."""
        from rich.live import Live

        self.steps = steps
        self.tail, self.evals = Tail(run_dir), Tail(run_dir, EVALS)
        self.tail.read()
        self.evals.read()
        self.slow = Slow()
        self.console = console()
        to_screen = sys.stderr.isatty()  # if stderr is a file, do not redirect it to the screen
        live = Live(console=self.console, refresh_per_second=5, transient=True, redirect_stderr=to_screen)
        self.live = live if self.console.is_terminal else None
        self.printed = 0.0
        self.parts: dict[str, str] = {}
        """Parts of the line that shows the newest row, keyed by names such as `loss`."""
        self.shown = ""
        self.waiting: str | None = None
        """The newest plain progress line if it is not printed yet, else None."""
        self.rows: list[StepRow] = []

    def __enter__(self) -> ProgressLine:
        (self.live or self.slow).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        (self.live or self.slow).__exit__(*error)
        if self.waiting is not None:
            say(self.waiting)

    def whose(self, run_dir: Path) -> str:
        return ""

    def refresh(self, phase: str) -> None:
        self.show(self.tail.read(), phase)
        for row in self.evals.read():
            loss, perplexity = number(row.get("eval/loss")), number(row.get("eval/perplexity"))
            text = figure_of("eval/loss").text(loss, "unknown")
            more = "" if perplexity is None else f"  perplexity {perplexity:.4g}"
            self.console.print(f"step {row.step}/{self.steps}  held-out loss {text}{more}")

    def show(self, rows: list[StepRow], phase: str = "") -> None:
        """Show `phase` and the newest row. `rows`: the rows that were added to events.jsonl since the previous call."""
        if rows:
            self.rows = [*self.rows, *rows][-RECENT:]
            self.parts = self._parts()
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
        """Show as many parts of the progress as fit on one line. Always show the step, the speed, the time left and the phase."""
        from rich.spinner import Spinner
        from rich.text import Text

        parts = self.parts | ({"phase": phase} if phase else {})
        for name in ("", *LEAVING):
            parts.pop(name, "")
            line = "  ".join(parts.values())
            if len(line) <= self.console.width - SPINNER:
                break
        if line != self.shown:  # update only for a new line, because an update restarts the spinner
            live.update(Spinner("line", Text(line)) if phase else Text(line))
            self.shown = line

    def _parts(self) -> dict[str, str]:
        row = self.rows[-1]
        step, speed, memory, left = progress_cells("running", self.steps, self.rows)

        def titled(key: str) -> str:
            return f"{figure_of(key).title} {figure_of(key).text(row[key], 'unknown')}"

        return {
            "step": f"step {step}",
            "loss": titled("train/loss"),
            "norm": titled("train/grad_norm"),
            "wps": f"{speed} WPS",
            "mfu": titled("perf/mfu"),
            "memory": memory,
            "left": f"{left} left" if row.step < self.steps else "done",
        }


def memory_text(row: Mapping[str, float | None]) -> str:
    """Format a step's peak memory: reserved memory on a GPU, or resident memory on a CPU."""
    reserved = figure_of("memory/peak_reserved_gib").cell([row])
    resident = figure_of("memory/peak_rss_gib").cell([row])
    return reserved or (f"{resident} host" if resident else UNKNOWN)


def run_table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Return a table with one line per run. If the table is wider than `width`, shorten the cells of YIELDING columns. If this
    is not enough, omit these columns, and finally cut the names."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(titles, *(map(one_line, row) for row in rows), strict=True))
    wanted = min(NAME_ROOM, max(map(len, columns[0])))

    def room() -> int:
        return width - sum(max(map(len, column)) + BETWEEN for column in columns[1:])

    if room() < wanted:
        # Shorten `32.14 GiB (33.82%)` to `32.14 GiB`.
        columns = [
            tuple(c.partition(" (")[0] for c in column) if column[0] in YIELDING else column for column in columns
        ]
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


def progress_cells(state: str, steps: Any, rows: Sequence[StepRow]) -> tuple[str, str, str, str]:
    """Return a run's cells for the columns of PROGRESS, except `state`. `steps`: steps of the run; `rows`: its newest rows."""
    if not rows:
        return f"0/{steps}" if is_count(steps) else UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN
    last, times = rows[-1], [time for row in rows[-RECENT:] if (time := number(row.get("perf/step_time_s")))]
    left = UNKNOWN
    if state == "running" and is_count(steps) and times:
        left = duration(median(times) * (steps - last.step))
    of = f"/{steps}" if is_count(steps) else ""
    return f"{last.step}{of}", SPEED.text(number(last.get(SPEED.key))), memory_text(last), left

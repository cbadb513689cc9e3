"""A sweep as plain lines, where no terminal shows its table: one for each run that has ended, with what is left."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean

from meshrunner.runner.compare.runs import Run, glance
from meshrunner.runner.console import duration, one_line, say
from meshrunner.runner.figures import figure_of, speed_figure
from meshrunner.runner.launch.progress import memory_text
from meshrunner.runner.rundir.states import RESULTS
from meshrunner.runner.rundir.sweep import run_labels

LOSS = figure_of("train/loss")


class RunLines:
    """
    The lines: `#3 fsdp2 full: completed, 1,086 WPS per device, 0.60 GiB host, loss 5.0710 (4 of 12, about 2m10s left)`.

    Used as a LiveTable is. A run is read once, when it has ended.
    """

    active = False

    def __init__(self, run_dirs: Sequence[Path], todo: Collection[Path], *, steps: bool) -> None:
        """
        Args:
            todo: the runs to be executed.
            steps: whether the steps of a run are printed meanwhile.
        """
        self.steps = steps
        self.labels = run_labels(run_dirs[0].parent)
        self._earlier = len(self.labels.keys() - {run_dir.name for run_dir in run_dirs})
        self._left, self.total = set(todo), len(run_dirs)
        self._began = time.monotonic()
        self._seconds: list[float] = []
        self._fastest: tuple[float, str] | None = None
        for run_dir in run_dirs:
            if run_dir not in todo:
                self._note(glance(run_dir))

    def label(self, run_dir: Path) -> str:
        """The number of a run's combination and what varies; the directory's name where that is not on record."""
        return self.labels.get(run_dir.name, run_dir.name)

    def __enter__(self) -> RunLines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run_started(self, run_dir: Path) -> None:
        """Begin a block where lines of its steps follow."""
        if self.steps:
            say(f"\n{self.label(run_dir)}")

    def refresh(self) -> None:
        """Nothing to redraw."""

    def run_ended(self, run_dir: Path) -> None:
        """Print the line of a run that has ended."""
        run = glance(run_dir)
        now = time.monotonic()
        self._seconds.append(now - self._began)
        self._began = now
        self._left.discard(run_dir)
        self._note(run)
        say(one_line(f"{self.label(run_dir)}: {self._result(run)} ({self._rest(run_dir)})"))

    def _note(self, run: Run) -> None:
        """Remember the fastest completed run."""
        speed = _speed(run)
        if speed is not None and (self._fastest is None or speed > self._fastest[0]):
            self._fastest = speed, self.label(run.path)

    def _result(self, run: Run) -> str:
        if run.state != "completed":
            return f"{run.state}, {run.reason}" if run.reason and run.state in RESULTS else run.state
        speed = speed_figure([run.summary])
        loss = LOSS.values([run.summary])[0]
        parts = [
            run.state,
            f"{speed.text(_speed(run))} {speed.title}",
            memory_text(run.summary),
            f"loss {LOSS.text(loss)}",
        ]
        return ", ".join(parts)

    def _rest(self, run_dir: Path) -> str:
        done = self._earlier + self.total - len(self._left)
        if self._earlier:  # a sweeper chooses what follows
            return f"run {done}"
        parts = [f"{done} of {self.total}"]
        if self._left:
            parts.append(f"about {duration(len(self._left) * fmean(self._seconds))} left")
        if self._fastest and self.total > 1:
            fastest = self._fastest[1]
            parts.append("the fastest so far" if fastest == self.label(run_dir) else f"fastest {fastest}")
        return ", ".join(parts)


def _speed(run: Run) -> float | None:
    return speed_figure([run.summary]).values([run.summary])[0] if run.state == "completed" else None

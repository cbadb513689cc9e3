"""What a sweep has come to so far: how many runs are done, how long the rest will take, which is the fastest."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean

from meshrunner.runner.compare.runs import Run, glance
from meshrunner.runner.console import duration
from meshrunner.runner.figures import speed_figure
from meshrunner.runner.rundir import run_labels


class Tally:
    """The count of a sweep's runs. A run is read once, when it has ended."""

    def __init__(self, run_dirs: Sequence[Path], todo: Collection[Path]) -> None:
        """
        Args:
            run_dirs: all runs of the sweep, or of a batch that an adaptive sweeper has chosen.
            todo: the runs to be executed.
        """
        self.labels = run_labels(run_dirs[0].parent)
        self.earlier = len(self.labels.keys() - {run_dir.name for run_dir in run_dirs})
        """Runs of earlier batches."""
        self.total = len(run_dirs)
        self._left = set(todo)
        self._since = time.monotonic()
        self._seconds: list[float] = []
        """Between the ends of two runs, those that run side by side included."""
        self._fastest: tuple[float, Run] | None = None
        for run_dir in run_dirs:
            if run_dir not in self._left:
                self._note(glance(run_dir))

    def label(self, run_dir: Path) -> str:
        """Return the number of a run's combination and what varies; the directory's name where that is not on record."""
        return self.labels.get(run_dir.name, run_dir.name)

    def ended(self, run_dir: Path) -> Run:
        """Count a run that has ended; returns it."""
        run = glance(run_dir)
        now = time.monotonic()
        self._seconds.append(now - self._since)
        self._since = now
        self._left.discard(run_dir)
        self._note(run)
        return run

    def _note(self, run: Run) -> None:
        """Remember the fastest completed run."""
        value = speed_of(run)
        if value is not None and (self._fastest is None or value > self._fastest[0]):
            self._fastest = value, run

    @property
    def done(self) -> int:
        """Runs that are not to be executed any more."""
        return self.earlier + self.total - len(self._left)

    @property
    def left(self) -> str:
        """`about 2m10s left`; empty where there is nothing to judge by, or nothing left."""
        if not self._left or not self._seconds:
            return ""
        expected = len(self._left) * fmean(self._seconds) - (time.monotonic() - self._since)
        return f"about {duration(max(expected, 1.0))} left"

    @property
    def fastest(self) -> Path | None:
        """Directory of the fastest completed run of several."""
        return self._fastest[1].path if self._fastest and self.total > 1 else None

    @property
    def line(self) -> str:
        """`5/12 done, about 2m10s left, best so far: #3 fsdp2 full 5,300 tokens per CPU-second`."""
        # How many will follow is known to an adaptive sweeper alone.
        parts = [f"{self.done} done" if self.earlier else f"{self.done}/{self.total} done", self.left]
        if self._fastest and self.fastest:
            value, run = self._fastest
            figure = speed_figure([run.figures])
            parts.append(f"best so far: {self.label(run.path)} {figure.text(value)} {figure.title}")
        return ", ".join(filter(None, parts))


def speed_of(run: Run) -> float | None:
    """What runs of its kind are compared by; None unless it is completed."""
    return speed_figure([run.figures]).values([run.figures])[0] if run.state == "completed" else None

"""The progress of a sweep: the number of finished runs, the remaining time, the fastest run, and a printed line for each run."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean
from typing import Self

from meshrunner.runner.compare.runs import Run, glance
from meshrunner.runner.console import Slow, duration, one_line, say
from meshrunner.runner.figures import figure_of, speed_figure
from meshrunner.runner.launch.progress import memory_text
from meshrunner.runner.rundir import RESULTS, run_labels

LOSS = figure_of("train/loss")


class Tally:
    """Counts the finished runs of a sweep, and finds the fastest run. Each run's directory is read once, after the run's end."""

    def __init__(self, run_dirs: Sequence[Path], todo: Collection[Path]) -> None:
        """Count the runs in `run_dirs`: all runs of a sweep, or one batch of an adaptive sweeper. `todo`: the runs to execute."""
        self.labels = run_labels(run_dirs[0].parent)
        self.earlier = len(self.labels.keys() - {run_dir.name for run_dir in run_dirs})
        """Number of runs in earlier batches."""
        self.total = len(run_dirs)
        self._left = set(todo)
        self._since = time.monotonic()
        self._seconds: list[float] = []
        """Seconds between the ends of two consecutive runs, even if runs execute in parallel."""
        self._fastest: tuple[float, Run] | None = None
        for run_dir in run_dirs:
            if run_dir not in self._left:
                self._compare(glance(run_dir))

    def label(self, run_dir: Path) -> str:
        """Return a run's label, such as `#3 fsdp2 full`, or the directory's name if the run has no label."""
        return self.labels.get(run_dir.name, run_dir.name)

    def whose(self, run_dir: Path) -> str:
        return f"{self.label(run_dir)}: "

    def ended(self, run_dir: Path) -> Run:
        """Count a run that has ended, and return the run."""
        run = glance(run_dir)
        now = time.monotonic()
        self._seconds.append(now - self._since)
        self._since = now
        self._left.discard(run_dir)
        self._compare(run)
        return run

    def _compare(self, run: Run) -> None:
        value = speed_of(run)
        if value is not None and (self._fastest is None or value > self._fastest[0]):
            self._fastest = value, run

    @property
    def done(self) -> int:
        """Number of runs that have ended or need no execution, including the runs of earlier batches."""
        return self.earlier + self.total - len(self._left)

    @property
    def left(self) -> str:
        """The text `about 2m10s left`, or an empty string if no run has ended or no run is left."""
        if not self._left or not self._seconds:
            return ""
        expected = len(self._left) * fmean(self._seconds) - (time.monotonic() - self._since)
        return f"about {duration(max(expected, 1.0))} left"

    @property
    def fastest(self) -> Path | None:
        """Directory of the fastest completed run; None if no run has completed or there is only one run."""
        return self._fastest[1].path if self._fastest and self.total > 1 else None

    @property
    def line(self) -> str:
        """Text such as `5/12 done, about 2m10s left, best so far: #3 fsdp2 full 5,300 tokens per CPU-second`."""
        # The total is unknown if an adaptive sweeper chooses further batches.
        parts = [f"{self.done} done" if self.earlier else f"{self.done}/{self.total} done", self.left]
        if self._fastest and self.fastest:
            value, run = self._fastest
            figure = speed_figure([run.figures])
            parts.append(f"best so far: {self.label(run.path)} {figure.text(value)} {figure.title}")
        return ", ".join(filter(None, parts))


def speed_of(run: Run) -> float | None:
    """Return the speed of a completed run, or None if the run has not completed. Higher is better."""
    return speed_figure([run.figures]).values([run.figures])[0] if run.state == "completed" else None


class RunLines(Tally):
    """Prints a line for each run that has ended. A sweep uses this class or LiveTable; both have the same methods. Example:
    `#3 fsdp2 full: completed, 1,086 WPS per device, 0.60 GiB host, loss 5.0710 (4 of 12, about 2m10s left)`"""

    def __init__(self, run_dirs: Sequence[Path], todo: Collection[Path], *, steps: bool) -> None:
        """Prepare to print a line for each run in `todo`. `steps`: whether each run prints its steps."""
        super().__init__(run_dirs, todo)
        self.steps = steps
        self._slow = Slow()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._slow.doing("")

    def run_started(self, run_dir: Path) -> None:
        """Print the run's label as a title if the steps of the run are printed below."""
        self._slow.whose = self.whose(run_dir)
        if self.steps:
            say(f"\n{self.label(run_dir)}")

    def refresh(self, phase: str = "") -> None:
        """Print the name of a phase, such as saving a checkpoint, if the phase lasts longer than SILENT_S seconds."""
        self._slow.doing(phase)

    def run_ended(self, run_dir: Path) -> None:
        self._slow.doing("")
        run = self.ended(run_dir)
        result = run.state
        if run.state == "completed":
            speed, loss = speed_figure([run.figures]), LOSS.text(LOSS.values([run.figures])[0])
            result += f", {speed.text(speed_of(run))} {speed.title}, {memory_text(run.figures)}, loss {loss}"
        elif run.reason and run.state in RESULTS:
            result += f", {run.reason}"
        say(one_line(f"{self.whose(run_dir)}{result} ({self._progress(run_dir)})"))

    def _progress(self, run_dir: Path) -> str:
        if self.earlier:  # the total is unknown: an adaptive sweeper chooses further batches
            return f"run {self.done}"
        parts = [f"{self.done} of {self.total}", self.left]
        if self.fastest:
            parts.append("the fastest so far" if self.fastest == run_dir else f"fastest {self.label(self.fastest)}")
        return ", ".join(filter(None, parts))

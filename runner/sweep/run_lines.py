"""Plain lines for a sweep without a terminal: one for each run that has ended, with the progress of the sweep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from meshrunner.runner.compare.runs import Run
from meshrunner.runner.console import Slow, one_line, say
from meshrunner.runner.figures import figure_of, speed_figure
from meshrunner.runner.launch.progress import memory_text
from meshrunner.runner.rundir import RESULTS
from meshrunner.runner.sweep.tally import Tally, speed_of

LOSS = figure_of("train/loss")


class RunLines:
    """
    Prints `#3 fsdp2 full: completed, 1,086 WPS per device, 0.60 GiB host, loss 5.0710 (4 of 12, about 2m10s left)`.

    It has the methods of LiveTable.
    """

    def __init__(self, run_dirs: Sequence[Path], todo: Collection[Path], *, steps: bool) -> None:
        """
        Args:
            todo: the runs to be executed.
            steps: whether each run prints its steps.
        """
        self.steps = steps
        self.tally = Tally(run_dirs, todo)
        self._slow = Slow()

    def whose(self, run_dir: Path) -> str:
        """Return the prefix of lines about a run."""
        return f"{self.tally.label(run_dir)}: "

    def __enter__(self) -> RunLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._slow.doing("")

    def run_started(self, run_dir: Path) -> None:
        """Print a title if lines of the run's steps follow."""
        self._slow.whose = self.whose(run_dir)
        if self.steps:
            say(f"\n{self.tally.label(run_dir)}")

    def refresh(self, phase: str = "") -> None:
        """Print the phase if it lasts long."""
        self._slow.doing(phase)

    def run_ended(self, run_dir: Path) -> None:
        """Print the line of a run that has ended."""
        self._slow.doing("")
        run = self.tally.ended(run_dir)
        say(one_line(f"{self.whose(run_dir)}{_result(run)} ({self._progress(run_dir)})"))

    def _progress(self, run_dir: Path) -> str:
        """Return the progress of the sweep, and whether this run is the fastest."""
        tally = self.tally
        if tally.earlier:  # the total is unknown: an adaptive sweeper chooses further batches
            return f"run {tally.done}"
        parts = [f"{tally.done} of {tally.total}", tally.left]
        if tally.fastest:
            fastest = tally.fastest == run_dir
            parts.append("the fastest so far" if fastest else f"fastest {tally.label(tally.fastest)}")
        return ", ".join(filter(None, parts))


def _result(run: Run) -> str:
    if run.state != "completed":
        return f"{run.state}, {run.reason}" if run.reason and run.state in RESULTS else run.state
    speed = speed_figure([run.figures])
    loss = LOSS.text(LOSS.values([run.figures])[0])
    return f"{run.state}, {speed.text(speed_of(run))} {speed.title}, {memory_text(run.figures)}, loss {loss}"

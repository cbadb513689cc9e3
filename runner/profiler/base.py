"""Defines the `profiler` group: the window of profiled steps, and the session that the meter drives on every rank."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Count, Option, whole
from meshrunner.runner.rundir.files import TRACES

if TYPE_CHECKING:
    import torch

    from meshrunner.runner.process.worker_context import WorkerContext


class ProfiledRun(NamedTuple):
    """Settings of an experiment that profilers depend on."""

    steps: int
    measure_after: int
    compiles: bool
    """Whether any part of the model is compiled."""


class Profiler(Option):
    """Base of the profilers."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.runner.profiler.base:NoProfiler",
        "trace": "meshrunner.runner.profiler.trace:TraceProfile",
        "memory": "meshrunner.runner.profiler.memory:MemoryProfile",
    }

    def problems(self, run: ProfiledRun, ranks: int) -> list[str]:
        """Return an error message for each setting that does not suit the run or its number of ranks."""
        return []

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        """Return a warning for each setting that may not work as intended. `done`: steps completed by earlier attempts."""
        return []

    def session(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> Session:
        """Open a worker's session. The meter calls this after the rank's device is set, before the model is built."""
        return Session(None, run, run_dir, 0)


class NoProfiler(Profiler):
    """No profiler."""


def _ranks(value: Any) -> Any:
    listed = isinstance(value, list) and all(type(rank) is int and rank >= 0 for rank in value)
    if value != "all" and not (listed and 0 < len(set(value)) == len(value)):
        raise PydanticCustomError(
            "ranks", "expected 'all' or a list of distinct ranks, such as [0, 1], got {got}", {"got": repr(value)}
        )
    return value


class Windowed(Profiler):
    """Base of profilers with a window of `steps` steps. An attempt's window begins after measure_after + `start` steps."""

    start: Annotated[int, whole(at_least=0)]
    """Number of measured steps before the window."""
    steps: Count
    """Number of profiled steps."""
    ranks: Annotated[list[int] | Literal["all"], BeforeValidator(_ranks)]
    """Ranks to profile: a list, or all."""

    def last_step(self, run: ProfiledRun, done: int = 0) -> int:
        """Return the step at which the profiling window ends, for an attempt that resumes after `done` steps."""
        return done + run.measure_after + self.start + self.steps

    def _exceeds_steps(self, run: ProfiledRun, done: int = 0) -> str:
        """Return `measure_after(5) + ... = 12 is more than steps(10)` if the window ends after the run, otherwise ""."""
        if (last := self.last_step(run, done)) <= run.steps:
            return ""
        before = f"{done} done before + " if done else ""
        return (
            f"{before}measure_after({run.measure_after}) + profiler.start({self.start}) + "
            f"profiler.steps({self.steps}) = {last} is more than steps({run.steps})"
        )

    def problems(self, run: ProfiledRun, ranks: int) -> list[str]:
        found = [exceeds] if (exceeds := self._exceeds_steps(run)) else []
        if self.ranks != "all" and (wrong := [rank for rank in self.ranks if rank >= ranks]):
            names = ", ".join(map(str, wrong))
            found.append(f"profiler.ranks: no such rank: {names}; the {ranks} ranks are 0 to {ranks - 1}")
        return found

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        exceeds = self._exceeds_steps(run, done) if done else ""
        return [f"profiler: no steps are left to profile: {exceeds}"] if exceeds else []


class Session:
    """Session of a profiler on one rank. The meter drives it. Subclasses profile the window on the chosen ranks."""

    figures: ClassVar[tuple[str, ...]] = ()
    """Names of the figures that `end` returns."""
    warms_up: ClassVar[bool] = False
    """Whether to profile the step before the window as a warm-up for the profiler, and to discard that profile."""

    def __init__(self, option: Windowed | None, run: ProfiledRun, run_dir: Path, rank: int) -> None:
        """Open the session. If `option` is None, the session has no window."""
        self.option, self.run, self.run_dir, self.rank = option, run, run_dir, rank
        self.chosen = option is not None and (option.ranks == "all" or rank in option.ranks)
        self.first = self.last = self.next_step = 0
        self.in_step = ExitStack()
        """Contexts that stay open while a step runs."""

    @property
    def recording(self) -> bool:
        """Whether the current step is profiled and so excluded from throughput."""
        return self.first > 0 and self.first - self.warms_up <= self.next_step <= self.last

    def started(self, device: torch.device, done: int) -> None:
        """Set the window once the model is built. Earlier attempts completed `done` steps."""
        self.device, self.next_step = device, done + 1
        if self.option is not None and (last := self.option.last_step(self.run, done)) <= self.run.steps:
            self.first, self.last = last - self.option.steps + 1, last
        self._enter_window()

    def turns_after(self, step: int) -> bool:
        """Return whether profiling begins or ends after this step. If so, the device must be idle. All ranks return the same."""
        return step in (self.first - 1 - self.warms_up, self.first - 1, self.last)

    def step_begins(self) -> None:
        """Prepare for the next step. The meter calls this before each step."""

    def pause(self) -> None:
        """Close the contexts of the current step. The meter calls this before any work that belongs to no step."""
        self.in_step.close()

    def step_done(self, step: int) -> list[float] | None:
        """Pause. Return this rank's figures if the window ends with this step, or None if it does not."""
        self.pause()
        self.next_step = step + 1
        self._enter_window()
        if step != self.last:
            return None
        return self.end() if self.chosen else [math.nan] * len(self.figures)

    def _enter_window(self) -> None:
        if self.chosen and self.warms_up and self.next_step == self.first - 1:
            self.warm_up()
        if self.chosen and self.next_step == self.first:
            (self.run_dir / TRACES).mkdir(exist_ok=True)
            self.begin()

    def warm_up(self) -> None:
        """Profile the warm-up step, `next_step`. There is no warm-up if the window begins with the attempt's first step."""

    def begin(self) -> None:
        """Begin to profile the window. Its first step is `next_step`."""

    def end(self) -> list[float]:
        """End the window: write this rank's files and return its figures. An unknown figure is NaN."""
        return []

    def summary(self, figures: list[list[float]]) -> dict[str, Any]:
        """Return entries of summary.json, given all ranks' figures [ranks, figures]. Called on rank 0 after the window."""
        return {}

    def out_of_memory(self) -> None:
        """Write the profile so far. The worker calls this if memory runs out."""

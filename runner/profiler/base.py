"""Defines base classes of profiler settings and profiler sessions. The meter, which times steps, calls a session at each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Count, Option, whole
from meshrunner.runner.rundir.files import TRACES

if TYPE_CHECKING:
    import torch

    from meshrunner.recipes.parallelism.base import Parallelism
    from meshrunner.runner.process.worker_context import WorkerContext


class ProfiledRun(NamedTuple):
    """Settings of a run that affect how it is profiled."""

    steps: int
    measure_after: int
    compiles: bool
    """Whether any part of the model is compiled."""
    layout: Parallelism

    @property
    def transfers(self) -> bool:
        """Whether a trace shows the transfers between pipeline stages. False if all-to-alls could be mistaken for transfers."""
        layout = self.layout
        all_to_all = layout.expert > 1 or (layout.context > 1 and layout.context_method == "ulysses")
        return layout.pipeline > 1 and not all_to_all


class Profiler(Option):
    """Base class of profilers: `profiler=trace` and `profiler=memory`."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.runner.profiler.base:NoProfiler",
        "trace": "meshrunner.runner.profiler.trace:TraceProfile",
        "memory": "meshrunner.runner.profiler.memory:MemoryProfile",
    }

    def problems(self, run: ProfiledRun, ranks: int) -> list[str]:
        """Return an error message for each profiler setting that does not suit the run or the number of ranks."""
        return []

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        """Return warnings about settings that may not work as intended. `done`: number of steps completed by earlier attempts."""
        return []

    def session(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> Session:
        """Create the session of one worker, after the device is set and before the model is built."""
        return Session(None, run, run_dir, context)


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
    """Base class of profilers of `steps` consecutive steps. An attempt's first `measure_after` + `start` steps are skipped."""

    start: Annotated[int, whole(at_least=0)]
    """Number of steps to skip before the first profiled step, in addition to the first `measure_after` steps."""
    steps: Count
    """Number of profiled steps."""
    ranks: Annotated[list[int] | Literal["all"], BeforeValidator(_ranks)]
    """Ranks to profile: a list such as [0, 1], or all."""

    def last_step(self, run: ProfiledRun, done: int = 0) -> int:
        """Return the number of the last step to profile in a run that is resumed after `done` steps."""
        return done + run.measure_after + self.start + self.steps

    def _exceeds_steps(self, run: ProfiledRun, done: int = 0) -> list[str]:
        """Return a list of one error message if the steps to profile end after the run's last step, otherwise an empty list."""
        if (last := self.last_step(run, done)) <= run.steps:
            return []
        before = f"{done} completed steps + " if done else ""
        window = f"measure_after({run.measure_after}) + profiler.start({self.start}) + profiler.steps({self.steps})"
        return [f"{before}{window} = {last} is more than steps({run.steps})"]

    def problems(self, run: ProfiledRun, ranks: int) -> list[str]:
        found = self._exceeds_steps(run)
        if self.ranks != "all" and (wrong := [rank for rank in self.ranks if rank >= ranks]):
            names = ", ".join(map(str, wrong))
            found.append(f"profiler.ranks: no such rank: {names}; the {ranks} ranks are 0 to {ranks - 1}")
        return found

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        exceeds = self._exceeds_steps(run, done) if done else []
        return [f"profiler: no steps are left to profile, because {each}" for each in exceeds]


class Session:
    """Session of a profiler on one rank. The meter creates a session on every rank, but only the chosen ranks profile."""

    figures: ClassVar[tuple[str, ...]] = ()
    """Names of the figures (measured numbers) that `end` returns."""
    warms_up: ClassVar[bool] = False
    """Whether the profiler warms up in the step before the profiled steps. The profile of the warm-up step is discarded."""

    def __init__(self, option: Windowed | None, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> None:
        """Create the session. If `option` is None, the session profiles no steps."""
        self.option, self.run, self.run_dir, self.rank = option, run, run_dir, context.rank
        self.chosen = option is not None and (context.emulated or option.ranks == "all" or self.rank in option.ranks)
        self.first = self.last = self.next_step = 0
        self.in_step = ExitStack()
        """Contexts that are open only while a step runs."""

    @property
    def recording(self) -> bool:
        """Whether the profiler runs in the current step, which then does not count towards throughput."""
        return self.first > 0 and self.first - self.warms_up <= self.next_step <= self.last

    def started(self, device: torch.device, done: int) -> None:
        """Compute which steps to profile, once the model is built. `done`: number of steps that earlier attempts completed."""
        self.device, self.next_step = device, done + 1
        if self.option is not None and (last := self.option.last_step(self.run, done)) <= self.run.steps:
            self.first, self.last = last - self.option.steps + 1, last
        self._enter_window()

    def turns_after(self, step: int) -> bool:
        """Return whether any rank's profiler starts or stops right after `step`. The device must be idle then."""
        return step in (self.first - 1 - self.warms_up, self.first - 1, self.last)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Mark the wait for a batch in the profile."""
        yield

    def step_begins(self) -> None:
        """Prepare to profile step `next_step`. The meter calls `step_begins` before each step."""

    def pause(self) -> None:
        """Close the contexts in `in_step`, so that they do not cover work between steps, such as saving a checkpoint."""
        self.in_step.close()

    def step_done(self, step: int) -> list[float] | None:
        """Finish a step. After the last profiled step, return this rank's figures, if there are any. Otherwise return None."""
        self.pause()
        self.next_step = step + 1
        self._enter_window()
        if step != self.last:
            return None
        return (self.end() if self.chosen else [math.nan] * len(self.figures)) or None

    def _enter_window(self) -> None:
        if self.chosen and self.warms_up and self.next_step == self.first - 1:
            self.warm_up()
        if self.chosen and self.next_step == self.first:
            (self.run_dir / TRACES).mkdir(exist_ok=True)
            self.begin()

    def warm_up(self) -> None:
        """Start the profiler for a warm-up in step `next_step`. An attempt whose first step is profiled has no warm-up step."""

    def begin(self) -> None:
        """Start profiling at the beginning of step `next_step`."""

    def end(self) -> list[float]:
        """Stop profiling. Write this rank's files and return the values of `figures`, with NaN for unknown values."""
        return []

    def summary(self, figures: list[list[float]]) -> dict[str, Any]:
        """Return items for summary.json. `figures[rank]` is the result of `end` on `rank`. Only rank 0 calls `summary`."""
        return {}

    def out_of_memory(self) -> None:
        """Write the profile of the steps so far, because the worker has run out of memory."""

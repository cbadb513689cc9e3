"""The `profiler` group: which steps are profiled, and what the meter tells a profiler in every rank."""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Count, Option, whole
from meshrunner.runner.rundir.files import TRACES

if TYPE_CHECKING:
    import torch

    from meshrunner.runner.process.worker_context import WorkerContext


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
"""What live tensors are for."""


class ProfiledRun(NamedTuple):
    """What a profiler is told of the run it is part of."""

    steps: int
    measure_after: int
    """First steps that do not count for throughput."""
    compiles: bool
    """Whether anything of the model is compiled."""


class Session:
    """A profiler at work in one rank, called by the meter. This one does nothing."""

    @property
    def recording(self) -> bool:
        """Whether the profiler slows the current step: such a step does not count for throughput."""
        return False

    def started(self, device: torch.device, done: int) -> None:
        """The model stands; so many steps were done by earlier attempts."""

    def step_begins(self) -> None:
        """What follows is part of the next step."""

    def pause(self) -> None:
        """What follows is part of no step, until the next `step_begins`."""

    def step_done(self, step: int) -> list[float] | None:
        """This rank's figures where the window ends with the step, on every rank; else None. Ends like `pause`."""
        return None

    def summary(self, figures: list[list[float]]) -> dict[str, Any]:
        """On rank 0, after the window: keys of summary.json from all ranks' figures, [ranks, figures]."""
        raise NotImplementedError

    def out_of_memory(self) -> None:
        """The run ends for want of memory: write what tells why."""


class Profiler(Option):
    """What is profiled."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.runner.profiler.base:NoProfiler",
        "trace": "meshrunner.runner.profiler.trace:Trace",
        "memory": "meshrunner.runner.profiler.memory:MemoryProfile",
    }

    def problems(self, run: ProfiledRun, ranks: int) -> list[str]:
        """What does not fit the run or its number of ranks."""
        return []

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        """
        What works, but is perhaps not what was meant.

        Args:
            done: steps of earlier attempts; 0 for a new run.
        """
        return []

    def session(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> Session:
        """Called in every worker before the model is built, with the rank's device current."""
        return Session()


class NoProfiler(Profiler):
    """Every step runs as it is."""


def _ranks(value: Any) -> Any:
    right = value == "all" or (
        isinstance(value, list)
        and len(value) > 0
        and all(type(rank) is int and rank >= 0 for rank in value)
        and len(set(value)) == len(value)
    )
    if not right:
        raise PydanticCustomError(
            "ranks", "expected 'all' or a list of different ranks, such as [0, 1], got {got}", {"got": repr(value)}
        )
    return value


class Windowed(Profiler):
    """Base of the options that profile some steps, the window: `steps` of them, after measure_after + `start` others."""

    start: Annotated[int, whole(at_least=0)]
    """Steps between those that do not count (measure_after) and the window."""
    steps: Count
    """Length of the window."""
    ranks: Annotated[list[int] | Literal["all"], BeforeValidator(_ranks)]
    """Which ranks: a list, or all."""

    def last(self, run: ProfiledRun, done: int = 0) -> int:
        """The window's last step, in an attempt that begins after `done` steps."""
        return done + run.measure_after + self.start + self.steps

    def _arithmetic(self, run: ProfiledRun, done: int) -> str:
        before = f"{done} done before + " if done else ""
        return (
            f"{before}measure_after({run.measure_after}) + profiler.start({self.start}) + "
            f"profiler.steps({self.steps}) = {self.last(run, done)} is more than steps({run.steps})"
        )

    def problems(self, run: ProfiledRun, ranks: int) -> list[str]:
        found = []
        if self.last(run) > run.steps:
            found.append(self._arithmetic(run, 0))
        if self.ranks != "all" and (wrong := [rank for rank in self.ranks if rank >= ranks]):
            names = ", ".join(map(str, wrong))
            found.append(f"profiler.ranks: there is no rank {names}, the {ranks} ranks are 0 to {ranks - 1}")
        return found

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        if done and self.last(run, done) > run.steps:
            return [f"profiler: nothing is profiled any more: {self._arithmetic(run, done)}"]
        return []


class WindowSession(Session):
    """Keeps the window; subclasses do the work on the ranks that were chosen."""

    figures: ClassVar[tuple[str, ...]]
    """Names of what `end` returns."""

    def __init__(self, option: Windowed, run: ProfiledRun, run_dir: Path, rank: int) -> None:
        self.option, self.run, self.rank = option, run, rank
        self.folder = run_dir / TRACES
        self.chosen = option.ranks == "all" or rank in option.ranks
        self.next_step = 0
        self.inside = False
        self.over = False

    @property
    def recording(self) -> bool:
        return self.inside

    def started(self, device: torch.device, done: int) -> None:
        self.device = device
        self.next_step = done + 1
        self.last = self.option.last(self.run, done)
        self.first = self.last - self.option.steps + 1
        self.over = self.last > self.run.steps
        self._enter_window()

    def step_done(self, step: int) -> list[float] | None:
        self.pause()
        self.next_step = step + 1
        if not self.inside:
            self._enter_window()
            return None
        if step < self.last:
            return None
        self.inside, self.over = False, True
        return self.end() if self.chosen else [math.nan] * len(self.figures)

    def _enter_window(self) -> None:
        if self.next_step == self.first and not self.over:
            self.inside = True
            if self.chosen:
                self.folder.mkdir(exist_ok=True)
                self.begin()

    @abstractmethod
    def begin(self) -> None:
        """The window begins with `next_step`."""

    @abstractmethod
    def end(self) -> list[float]:
        """The window is over: write this rank's files and return its figures, NaN for those that cannot be known."""

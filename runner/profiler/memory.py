"""profiler=memory: what holds memory at its peak, and when there is not enough of it.

The allocator's history on CUDA, an account of live tensors on a CPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from meshrunner.recipes.option import Count
from meshrunner.runner.profiler.base import CATEGORIES, ProfiledRun, Session, Windowed, WindowSession
from meshrunner.runner.rundir.files import write_json

if TYPE_CHECKING:
    import torch

    from meshrunner.runner.process.worker_context import WorkerContext
    from meshrunner.runner.profiler.live_tensors import LiveTensors

GIB = 2**30
KEYS = ("memory/peak_live_gib", *(f"memory/live_{category}_gib" for category in CATEGORIES))


class MemoryProfile(Windowed):
    """
    On CUDA the allocator's history from the start up to the window's end, with stacks, in trace/memory_rank0.pickle for
    pytorch.org/memory_viz; it is written when the window is over, or when memory runs out. Every row up to there is
    `profiled`. After the window nothing is recorded, so that it can be measured; out of memory then, the allocator's
    state without history goes to trace/memory_rank0_oom.pickle.

    On a CPU the peak of live tensors in the window, by category, in trace/memory_rank0.json and as `memory/peak_live_gib`
    and `memory/live_*_gib` in summary.json, of the rank where it is highest. Not of a compiled model: see `LiveTensors`.
    """

    max_entries: Count
    """CUDA: allocations and frees that are remembered; older ones are forgotten."""

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        found = super().remarks(run, device_type, done)
        if device_type == "cpu" and run.compiles:
            found.append("profiler: compiled code allocates unseen on a CPU, so memory/peak_live_gib will be null")
        return found

    def session(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> Session:
        session = HistorySession if context.device_type == "cuda" else LiveSession
        return session(self, run, run_dir, context.rank)


class HistorySession(WindowSession):
    """The caching allocator's own record, from before the model is built."""

    figures: ClassVar[tuple[str, ...]] = ("written",)
    option: MemoryProfile

    def __init__(self, option: MemoryProfile, run: ProfiledRun, run_dir: Path, rank: int) -> None:
        super().__init__(option, run, run_dir, rank)
        if self.chosen:
            _cuda_memory()._record_memory_history(max_entries=option.max_entries)

    @property
    def recording(self) -> bool:
        return not self.over

    def started(self, device: torch.device, done: int) -> None:
        super().started(device, done)
        if self.over:
            self._stop()

    def begin(self) -> None:
        """Nothing: it is recorded already."""

    def end(self) -> list[float]:
        self._write("")
        self._stop()
        return [1.0]

    def summary(self, figures: list[list[float]]) -> dict[str, Any]:
        return dict.fromkeys(KEYS)  # memory/peak_active_gib knows it better

    def out_of_memory(self) -> None:
        if self.chosen:
            self._write("_oom" if self.over else "")

    def _write(self, suffix: str) -> None:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"memory_rank{self.rank}{suffix}.pickle"
        _cuda_memory()._dump_snapshot(str(path))

    def _stop(self) -> None:
        if self.chosen:
            _cuda_memory()._record_memory_history(enabled=None)


def _cuda_memory() -> Any:
    """Here, not above: a configuration is checked without torch."""
    from torch.cuda import memory

    return memory


class LiveSession(WindowSession):
    """`LiveTensors` inside the window's steps; what is done between two steps is not accounted for."""

    figures: ClassVar[tuple[str, ...]] = KEYS
    option: MemoryProfile
    live: LiveTensors | None = None
    entered = False

    def begin(self) -> None:
        if not self.run.compiles:
            from meshrunner.runner.profiler.live_tensors import LiveTensors

            self.live = LiveTensors()

    def step_begins(self) -> None:
        if self.live is not None:
            self.live.__enter__()
            self.entered = True

    def pause(self) -> None:
        if self.live is not None and self.entered:
            self.live.__exit__(None, None, None)
            self.entered = False

    def end(self) -> list[float]:
        figures = self._write(out_of_memory=False)
        self.live = None
        return figures

    def summary(self, figures: list[list[float]]) -> dict[str, Any]:
        known = [row for row in figures if not math.isnan(row[0])]
        return dict(zip(KEYS, max(known), strict=True)) if known else dict.fromkeys(KEYS)

    def out_of_memory(self) -> None:
        self.pause()
        if self.live is not None:
            self._write(out_of_memory=True)

    def _write(self, *, out_of_memory: bool) -> list[float]:
        peak = None if self.live is None else self.live.peak
        found = [math.nan] * len(KEYS)
        if peak is not None:
            found = [peak.total / GIB, *(peak.by_category[category] / GIB for category in CATEGORIES)]
        record: dict[str, Any] = {"rank": self.rank, "steps": [self.first, self.last], "out_of_memory": out_of_memory}
        record |= {"peak_live_bytes": peak and peak.total, "by_category": peak and peak.by_category}
        write_json(self.folder / f"memory_rank{self.rank}.json", record)
        return found

"""What profiler=memory does in a rank: the allocator's history on CUDA, an account of live tensors on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from runner.memory import GIB
from runner.profiler.base import WindowSession
from runner.profiler.live import CATEGORIES, LiveTensors
from runner.rundir import write_json

if TYPE_CHECKING:
    from runner.experiment import Experiment
    from runner.profiler.memory import MemoryProfile

KEYS = ("memory/peak_live_gib", *(f"memory/live_{category}_gib" for category in CATEGORIES))


class HistorySession(WindowSession):
    """The caching allocator's own record, from before the model is built."""

    figures: ClassVar[tuple[str, ...]] = ("written",)
    option: MemoryProfile

    def __init__(self, option: MemoryProfile, experiment: Experiment, run_dir: Path, rank: int) -> None:
        super().__init__(option, experiment, run_dir, rank)
        if self.chosen:
            torch.cuda.memory._record_memory_history(max_entries=option.max_entries)

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
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]

    def _stop(self) -> None:
        if self.chosen:
            torch.cuda.memory._record_memory_history(enabled=None)


class LiveSession(WindowSession):
    """`LiveTensors` inside the window's steps; what is done between two steps is not accounted for."""

    figures: ClassVar[tuple[str, ...]] = KEYS
    option: MemoryProfile
    live: LiveTensors | None = None
    entered = False

    def begin(self) -> None:
        if not self.experiment.compile.compiles:
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

"""Implements `profiler=memory`, which records the allocator's history on CUDA, and the live tensors at the peak on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from meshrunner.recipes.option import Count
from meshrunner.runner.ledger.allocations import CATEGORIES
from meshrunner.runner.profiler.base import ProfiledRun, Session, Windowed
from meshrunner.runner.rundir.files import TRACES, memory_profile, write_json

if TYPE_CHECKING:
    import torch

    from meshrunner.runner.ledger.memory_ledger import MemoryLedger
    from meshrunner.runner.process.worker_context import WorkerContext

GIB = 2**30
KEYS = ("memory/peak_live_gib", *(f"memory/live_{category}_gib" for category in CATEGORIES))


class MemoryProfile(Windowed):
    """Memory profile of the chosen ranks.

    On CUDA, trace/memory_rank0.pickle lists the allocations and frees up to the last profiled step, with their call stacks. The
    .pickle file is written after the last profiled step or when memory runs out. View the .pickle file at
    pytorch.org/memory_viz. Steps up to the last profiled step do not count towards throughput. If memory runs out after the last
    profiled step, trace/memory_rank0_oom.pickle shows the memory in use at that time.

    On a CPU, trace/memory_rank0.json holds the peak bytes of live tensors in the profiled steps, in total and per category. In
    summary.json, `memory/peak_live_gib` and `memory/live_*_gib` are the values of the rank with the highest peak, in GiB. The
    values are null if the model is compiled, because `MemoryLedger` cannot track compiled code.
    """

    max_entries: Count
    """Maximum number of allocations and frees in the history on CUDA. If there are more, only the newest are kept."""

    def remarks(self, run: ProfiledRun, device_type: str, done: int) -> list[str]:
        found = super().remarks(run, device_type, done)
        if device_type == "cpu" and run.compiles:
            found.append(
                "profiler: allocations in compiled code are not tracked on a CPU, so memory/peak_live_gib will be null"
            )
        return found

    def session(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> Session:
        session = HistorySession if context.device_type == "cuda" else LiveSession
        return session(self, run, run_dir, context)


class MemorySession(Session):
    """Base class of the sessions of `profiler=memory`. `end` returns the values of KEYS, with NaN for unknown values."""

    figures: ClassVar[tuple[str, ...]] = KEYS

    def summary(self, figures: list[list[float]]) -> dict[str, Any]:
        known = [row for row in figures if not math.isnan(row[0])]
        return dict(zip(KEYS, max(known), strict=True)) if known else dict.fromkeys(KEYS)


class HistorySession(MemorySession):
    """Session on CUDA that records the caching allocator's history from before the model is built to the last profiled step."""

    def __init__(self, option: MemoryProfile, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> None:
        super().__init__(option, run, run_dir, context)
        from torch.cuda import memory  # imported here, because configurations are checked without torch

        self.allocator: Any = memory
        if self.chosen:
            self.allocator._record_memory_history(max_entries=option.max_entries)

    @property
    def recording(self) -> bool:
        return self.next_step <= self.last

    def started(self, device: torch.device, done: int) -> None:
        super().started(device, done)
        if self.chosen and not self.recording:
            self.allocator._record_memory_history(enabled=None)

    def end(self) -> list[float]:
        self._write(".pickle")
        self.allocator._record_memory_history(enabled=None)
        return [math.nan] * len(KEYS)  # the run's memory/peak_active_gib is more precise

    def out_of_memory(self) -> None:
        if self.chosen:
            self._write(".pickle" if self.recording else "_oom.pickle")

    def _write(self, ending: str) -> None:
        (self.run_dir / TRACES).mkdir(exist_ok=True)
        self.allocator._dump_snapshot(str(memory_profile(self.run_dir, self.rank, ending)))


class LiveSession(MemorySession):
    """Session on a CPU, in which a `MemoryLedger` records live tensors during the profiled steps, but not between steps."""

    ledger: MemoryLedger | None = None

    def begin(self) -> None:
        if not self.run.compiles:
            from meshrunner.runner.ledger.memory_ledger import MemoryLedger

            self.ledger = MemoryLedger()

    def turns_after(self, step: int) -> bool:
        return self.first - 1 <= step <= self.last  # makes the meter read the metrics, which frees their tensors

    def step_begins(self) -> None:
        if self.ledger is not None:
            self.in_step.enter_context(self.ledger.phases).begin_step()
            self.in_step.enter_context(self.ledger)

    def end(self) -> list[float]:
        figures = self._write(out_of_memory=False)
        self.ledger = None
        return figures

    def out_of_memory(self) -> None:
        self.pause()
        if self.ledger is not None:
            self._write(out_of_memory=True)

    def _write(self, *, out_of_memory: bool) -> list[float]:
        """Write the peak memory to this rank's file, and return the values of KEYS."""
        peak = None if self.ledger is None else self.ledger.peak
        record: dict[str, Any] = {"rank": self.rank, "steps": [self.first, self.last], "out_of_memory": out_of_memory}
        record |= {"peak_live_bytes": peak and peak.total, "by_category": peak and peak.by_category}
        record["phase"] = str(peak.phase) if peak is not None and peak.phase is not None else None
        write_json(memory_profile(self.run_dir, self.rank, ".json"), record)
        if peak is None:
            return [math.nan] * len(KEYS)
        return [peak.total / GIB, *(peak.by_category[category] / GIB for category in CATEGORIES)]

"""profiler=memory: what holds memory at its peak, and when there is not enough of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.option import Count
from runner.profiler.base import Session, Windowed

if TYPE_CHECKING:
    from runner.experiment import Experiment
    from runner.worker import Seat


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

    def remarks(self, experiment: Experiment, device_type: str, done: int) -> list[str]:
        found = super().remarks(experiment, device_type, done)
        if device_type == "cpu" and experiment.compile.compiles:
            found.append("profiler: compiled code allocates unseen on a CPU, so memory/peak_live_gib will be null")
        return found

    def session(self, experiment: Experiment, run_dir: Path, seat: Seat) -> Session:
        from runner.profiler.memory_sessions import HistorySession, LiveSession

        session = HistorySession if seat.device_type == "cuda" else LiveSession
        return session(self, experiment, run_dir, seat.rank)

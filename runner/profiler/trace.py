"""Implements `profiler=trace`: Chrome traces of the chosen ranks, and their shares of compute, communication and idle time."""

import gzip
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.profiler.activities import STEP, Event
from meshrunner.runner.profiler.base import ProfiledRun, Session, Windowed
from meshrunner.runner.profiler.step_lines import Interval, Shares, divide, pipeline_idle_pct, shares
from meshrunner.runner.rundir import TraceTable
from meshrunner.runner.rundir.files import TRACE_TABLE, TRACES, rank_trace


class TraceProfile(Windowed):
    """Chrome traces (trace/rank0.json.gz, for Perfetto or chrome://tracing) and a table of time shares (trace/table.json).

    The profiler warms up in the step before the traced steps, because the profiler starts slowly on CUDA. The warm-up step
    is not traced and does not count towards throughput. The peak host memory of the run includes the profiler's own memory.
    """

    with_stack: bool
    """Whether to record the source line that called each operator, which slows down every operator."""
    record_shapes: bool
    """Whether to record the shapes of each operator's inputs."""
    profile_memory: bool
    """Whether to record allocated memory as a counter in the trace."""

    def session(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> "TraceSession":
        return TraceSession(self, run, run_dir, context)


class TraceSession(Session):
    """Session that runs torch.profiler during the steps to profile, and marks each profiled step in the trace."""

    figures: ClassVar[tuple[str, ...]] = (*Shares._fields, "pipeline_idle_pct")
    warms_up: ClassVar[bool] = True
    option: TraceProfile
    profile: Any = None

    def warm_up(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self.profile = profile(
            activities=[ProfilerActivity.CPU, *on_cuda],
            with_stack=self.option.with_stack,
            record_shapes=self.option.record_shapes,
            profile_memory=self.option.profile_memory,
        )
        self.profile.prepare_trace()

    def begin(self) -> None:
        if self.profile is None:
            self.warm_up()
        self._synchronize()
        self.profile.start_trace()

    def step_begins(self) -> None:
        if self.chosen and self.first <= self.next_step <= self.last:
            from torch.profiler import record_function

            self.in_step.enter_context(record_function(f"{STEP}{self.next_step}"))

    def stop(self) -> list[Event]:
        """Stop the trace, write it and return its events."""
        self._synchronize()
        self.profile.stop_trace()
        path = rank_trace(self.run_dir, self.rank)
        self.profile.export_chrome_trace(str(path))
        self.profile = None
        with gzip.open(path, "rt") as file:
            events: list[Event] = json.load(file)["traceEvents"]
        return events

    def end(self) -> list[float]:
        return self.figures_of(divide(self.stop()))

    def figures_of(self, steps: list[list[Interval]]) -> list[float]:
        """Return the values of `figures` for the traced steps."""
        idle = pipeline_idle_pct(steps) if self.run.transfers else math.nan
        return [*(shares(steps) or [math.nan] * len(Shares._fields)), idle]

    def _synchronize(self) -> None:
        """Wait until the device is idle, so that no kernel runs while the trace starts or stops."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def summary(self, figures: list[list[float]]) -> dict[str, Any]:
        self.write_table(figures)
        known = [row for row in figures if not math.isnan(row[0])]
        *means, idle = map(fmean, zip(*known, strict=True)) if known else [None] * len(self.figures)
        measured = {"pipeline/measured_idle_pct": idle} if self.run.transfers else {}
        return {f"trace/{name}": mean for name, mean in zip(Shares._fields, means, strict=True)} | measured

    def write_table(self, figures: list[list[float]]) -> None:
        """Write the time shares of each profiled rank to trace/table.json."""
        ranks = range(len(figures)) if self.option.ranks == "all" else sorted(self.option.ranks)
        rows = [{"rank": rank} | dict(zip(Shares._fields, figures[rank], strict=False)) for rank in ranks]
        (self.run_dir / TRACES).mkdir(exist_ok=True)
        TraceTable.model_validate({"steps": (self.first, self.last), "ranks": rows}).write(self.run_dir / TRACE_TABLE)

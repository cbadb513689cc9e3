"""Traces the last steps of a run (`sweep.explain`), and keeps only the seconds per line of a step."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from meshrunner.runner.explain.activities import DATA
from meshrunner.runner.explain.step_lines import seconds_by_line
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.profiler.base import ProfiledRun
from meshrunner.runner.profiler.trace import TraceProfile, TraceSession
from meshrunner.runner.rundir import Explanation
from meshrunner.runner.rundir.files import EXPLANATION, TRACES, rank_trace

STEPS = 2
"""Number of traced steps."""


class LastSteps(TraceProfile):
    """Profile of the last steps of a run. A resumed run with too few remaining steps has none."""

    def last_step(self, run: ProfiledRun, done: int = 0) -> int:
        return max(run.steps, done + run.measure_after + 1 + TraceSession.warms_up + self.steps)


OPTION = LastSteps(
    kind="trace", start=0, steps=STEPS, ranks=[0], with_stack=False, record_shapes=False, profile_memory=False
)


class ExplainSession(TraceSession):
    """Session that writes explain.json on rank 0 or on the emulated rank."""

    figures: ClassVar[tuple[str, ...]] = ()

    def __init__(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> None:
        super().__init__(OPTION, run, run_dir, context)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        if not self.recording:
            yield
            return
        from torch.profiler import record_function

        with record_function(DATA):
            yield

    def end(self) -> list[float]:
        lines = seconds_by_line(self.stop())
        rank_trace(self.run_dir, self.rank).unlink()
        with suppress(OSError):  # an earlier attempt may have left other traces
            (self.run_dir / TRACES).rmdir()
        Explanation.model_validate({"steps": (self.first, self.last), "seconds": lines}).write(
            self.run_dir / EXPLANATION
        )
        return []

"""Traces the last steps of a run (`sweep.explain`), and stores only the seconds per step of each ledger line and module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.model.base import clean_name
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.profiler.activities import DATA, MODULE
from meshrunner.runner.profiler.base import ProfiledRun
from meshrunner.runner.profiler.step_lines import divide, seconds_by_line, seconds_by_module
from meshrunner.runner.profiler.trace import TraceProfile, TraceSession
from meshrunner.runner.rundir import Explanation
from meshrunner.runner.rundir.files import EXPLANATION, TRACES, rank_trace

if TYPE_CHECKING:
    from torch import nn


class LastSteps(TraceProfile):
    """Profile of the last steps of a run. A resumed run with too few remaining steps has no profile."""

    def last_step(self, run: ProfiledRun, done: int = 0) -> int:
        return max(run.steps, done + run.measure_after + 1 + TraceSession.warms_up + self.steps)


OPTION = LastSteps(
    kind="trace", start=0, steps=2, ranks=[0], with_stack=False, record_shapes=False, profile_memory=False
)


class ExplainSession(TraceSession):
    """Session that writes explain.json on rank 0 or on the emulated rank."""

    def __init__(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> None:
        super().__init__(OPTION, run, run_dir, context)
        degrees = run.layout.degrees(context.node.count, context.workers)
        sizes = degrees._asdict() | {"expert": run.layout.expert}
        self.dims = tuple(name for name in ("replicate", "shard", "context", "expert", "tensor") if sizes[name] > 1)
        self._hooks = ExitStack()

    def begin(self) -> None:
        super().begin()
        if not self.run.compiles:  # the compiler would trace the hooks
            self._hooks.enter_context(_marked_modules())

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        if not self.recording:
            yield
            return
        from torch.profiler import record_function

        with record_function(DATA):
            yield

    def end(self) -> list[float]:
        self._hooks.close()
        steps = divide(self.stop(), self.dims)
        rank_trace(self.run_dir, self.rank).unlink()
        with suppress(OSError):  # an earlier attempt may have left other traces
            (self.run_dir / TRACES).rmdir()
        found = {"seconds": seconds_by_line(steps), "modules": seconds_by_module(steps)}
        Explanation.model_validate({"steps": (self.first, self.last), **found}).write(self.run_dir / EXPLANATION)
        return self.figures_of(steps)

    def write_table(self, figures: list[list[float]]) -> None:
        """Write no table, because explain.json is more detailed."""


@contextmanager
def _marked_modules() -> Iterator[None]:
    """Mark the forward pass of each module in the trace."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.profiler import record_function

    names: dict[int, str] = {}
    marks: list[Any] = []

    def begins(module: nn.Module, _: Any) -> None:
        if id(module) not in names:  # the first module called is the whole network
            names.update((id(each), clean_name(name)) for name, each in module.named_modules())
        marks.append(record_function(f"{MODULE}{names[id(module)]}"))
        marks[-1].__enter__()

    def ends(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    begun, ended = register_module_forward_pre_hook(begins), register_module_forward_hook(ends, always_call=True)
    with begun, ended:
        yield

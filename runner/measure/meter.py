"""The meter: measures every step on every rank, and on rank 0 appends a row per step to `events.jsonl`.

A step's values stay on the device until the read-out, every `log_every` steps; then the ranks' figures are gathered and the
rows are written and flushed. The time of a read-out belongs to no step.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrunner.recipes.errors import NotRecorded
from meshrunner.recipes.meter import Phase
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.measure.by_rank import ByRank
from meshrunner.runner.measure.compilation import compile_facts, compile_seconds, recompile_reasons
from meshrunner.runner.measure.memory import memory_of
from meshrunner.runner.measure.peak_flops import peak_flops
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.rundir.files import EVENTS, SUMMARY, read_json, write_json
from meshrunner.runner.rundir.layouts import add_layout
from meshrunner.runner.rundir.location import Location

COLLECT_EVERY = 50
"""Steps between two runs of Python's garbage collector, which is disabled during training."""
RANK_VALUES = 5
"""Number of values per rank and step that `_row` takes."""


@dataclass
class _Step:
    """A completed step, before the read-out."""

    number: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: int
    data_time: float
    cpu_time: float
    compile_time: float
    profiled: bool
    begin: Any
    end: Any
    finished: float


class RunMeter:
    """The implementation of `meshrunner.recipes.meter.Meter`."""

    def __init__(self, experiment: Experiment, run_dir: Path, context: WorkerContext) -> None:
        self.experiment, self.run_dir, self.context = experiment, run_dir, context
        self.pending: list[_Step] = []
        self.data_time = 0.0
        self.tokens = 0
        self.resumed_at = 0
        self.done = 0
        self.begun = False
        self.compile_time = 0.0
        self.recompiles = 0
        self.late_recompiles: list[dict[str, Any]] = []
        self.by_rank = ByRank(context.world_size)
        self.profiler = experiment.profiler.session(experiment.profiled, run_dir, context)
        self.events = (run_dir / EVENTS).open("a") if context.rank == 0 else None
        self.location = Location(run_dir) if context.rank == 0 else None

    def doing(self, phase: Phase) -> None:
        self.context.doing(phase)

    def started(
        self,
        *,
        device: torch.device,
        params: int,
        flops_per_token: int,
        attention_flops_per_token: int,
        describe_data: Callable[[], dict[str, Any]],
    ) -> None:
        self.device, self.describe_data = device, describe_data
        self.memory = memory_of(device)
        self.memory.release_cached()
        self.flops, self.attention_flops = flops_per_token, attention_flops_per_token
        self.peak, facts = peak_flops(self.experiment, device, self.context)
        facts |= {"model/params": params, "model/flops_per_token": flops_per_token}
        facts |= {"world_size": self.context.world_size, "device_memory_gib": self.memory.total_gib}
        if self.context.rank == 0:
            self._add_to_summary(facts | {"data": describe_data()})
            own = {name: facts[name] for name in ("device", "world_size")}
            own |= {"threads": self.context.threads, "torch": torch.__version__}
            add_layout(self.run_dir, self.context.attempt, self.experiment.model_dump(mode="json"), own)
        self.profiler.started(device, self.resumed_at)
        self.begun = True
        compiles = self.experiment.compile.compiles
        self.context.doing("compiling, in the first step" if compiles else "the first step")
        self._begin_step()

    def resumed(self, step: int, tokens: int) -> None:
        self.resumed_at, self.tokens = step, tokens
        self.done = step

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.data_time += time.perf_counter() - since

    def step_done(self, step: int, *, loss: Tensor, grad_norm: Tensor, lr: float, tokens: int) -> None:
        self.done = step
        end, cpu_time = self._now(), time.process_time() - self.cpu_begin
        before, self.compile_time = self.compile_time, compile_seconds()
        compile_time = self.compile_time - before
        times, profiled = (self.data_time, cpu_time, compile_time), self.profiler.recording
        self.pending.append(_Step(step, loss, grad_norm, lr, tokens, *times, profiled, self.begin, end, time.time()))
        figures = self.profiler.step_done(step)
        if figures is not None:
            self._end_profile(figures)
        self.data_time = 0.0
        if compile_time and step > self.resumed_at + self.experiment.measure_after:
            self._record_recompiles(step)
        self.context.steps[self.context.local_rank] = step
        # The first step is read out immediately, whatever log_every is: it ends the start-up.
        if step == self.resumed_at + 1:
            self.context.doing("")
        if step == self.resumed_at + 1 or step % self.experiment.log_every == 0 or step == self.experiment.steps:
            self._read_out()
        if step == self.experiment.steps and self.context.rank == 0:
            self._add_to_summary({"data": self.describe_data()})  # all of it may have been read by now
        if step == self.resumed_at + self.experiment.measure_after:
            self._begin_measuring()
        if step % COLLECT_EVERY == 0:
            gc.collect(1)
        self._begin_step()

    @contextmanager
    def saving(self) -> Iterator[None]:
        self.context.doing("saving a checkpoint")
        self.profiler.pause()
        # Rows first: a checkpoint ahead of them would leave a gap when the run is resumed.
        if self.pending:
            self._read_out()
        if self.events is not None:
            os.fsync(self.events.fileno())
        yield
        self.context.doing("")
        self._begin_step()

    @property
    def step(self) -> int:
        """The step that is under way, counted from 1; 0 before the first step of this attempt."""
        return self.done + 1 if self.begun else 0

    def out_of_memory(self) -> None:
        """The run ends because memory ran out."""
        self.profiler.out_of_memory()

    def _begin_step(self) -> None:
        self.profiler.step_begins()
        self.begin, self.cpu_begin = self._now(), time.process_time()

    def _end_profile(self, figures: list[float]) -> None:
        everyone = self._gather(figures).tolist()
        if self.context.rank == 0:
            self._add_to_summary(self.profiler.summary(everyone))

    def _now(self) -> Any:
        """A time stamp: an event in the current stream on CUDA, else seconds."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, step: _Step) -> float:
        if self.device.type != "cuda":
            return float(step.end - step.begin)
        return float(step.begin.elapsed_time(step.end)) / 1e3

    def _begin_measuring(self) -> None:
        """The measured window begins: record the memory peaks of the start-up and reset them."""
        startup = self._gather([self.memory.read()[key] or 0.0 for key in self.memory.keys])
        peaks = dict(zip(self.memory.keys, startup.amax(0).tolist(), strict=True))
        self._add_to_summary({k.replace("memory/", "memory/startup_"): peaks[k] for k in peaks if "_gib" in k})
        self.memory.reset()
        self.recompiles = len(recompile_reasons())

    def _record_recompiles(self, step: int) -> None:
        """Add the reasons of recompilations inside the measured window, where none is expected, to the summary."""
        reasons = recompile_reasons()
        self.late_recompiles += [{"step": step, "reason": reason} for reason in reasons[self.recompiles :]]
        self.recompiles = len(reasons)
        self._add_to_summary({"compile/late_recompiles": self.late_recompiles})

    def _add_to_summary(self, facts: dict[str, Any]) -> None:
        """On rank 0, add keys to summary.json that do not follow from the rows."""
        if self.location is not None:
            path = (self.location.now() or self.run_dir) / SUMMARY
            write_json(path, read_json(path) | facts)

    def _gather(self, values: list[float]) -> Tensor:
        """Every rank's values, fp64 in host memory: [ranks, values]."""
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.context.world_size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone)

    def _read_out(self) -> None:
        steps, self.pending = self.pending, []
        on_device = torch.stack([value.float() for s in steps for value in (s.loss, s.grad_norm)])
        losses, norms = on_device.view(-1, 2).T.tolist()  # the one synchronisation
        per_step = [
            [loss, self._seconds(s), s.data_time, s.cpu_time, s.compile_time]
            for loss, s in zip(losses, steps, strict=True)
        ]
        memory = self.memory.read()
        everyone = self._gather(
            [*(value for values in per_step for value in values), *(memory[key] or 0.0 for key in self.memory.keys)]
        )
        ranks_steps, ranks_memory = torch.split(everyone, [RANK_VALUES * len(steps), len(self.memory.keys)], dim=1)
        ranks_steps = ranks_steps.view(self.context.world_size, len(steps), RANK_VALUES)
        if self.context.rank == 0:
            peaks = dict(zip(self.memory.keys, ranks_memory.amax(0).tolist(), strict=True))
            if steps[0].number == self.resumed_at + 1 or steps[-1].number == self.experiment.steps:
                self._add_to_summary(compile_facts() if self.compile_time else {})
            for i, step in enumerate(steps):
                if step.number > self.resumed_at + self.experiment.measure_after and not step.profiled:
                    self.by_rank.add(ranks_steps[:, i, 1:])
                profiled = {"profiled": True} if step.profiled else {}
                self._write(self._row(step, norms[i], ranks_steps[:, i]) | self.memory.row(peaks) | profiled)
            if steps[-1].number == self.experiment.steps:
                self._add_to_summary(self.by_rank.summary(self.memory.keys, ranks_memory))
        self._stop_if_not_finite(steps, ranks_steps[:, :, 0], norms)

    def _row(self, step: _Step, grad_norm: float, ranks: Tensor) -> dict[str, Any]:
        """
        One row of events.jsonl.

        WPS = tokens of the step / (seconds x devices); MFU = WPS x FLOPs per token / peak FLOP/s of the device.

        Args:
            ranks: loss, seconds, seconds of waiting for data, CPU seconds and seconds of compiling of every rank:
                [ranks, RANK_VALUES].
        """
        loss, cpu = ranks[:, 0].mean().item(), ranks[:, 3].sum().item()
        seconds, waited = ranks[:, 1:3].amax(0).tolist()  # the slowest rank's
        self.tokens += step.tokens
        wps = step.tokens / (seconds * self.context.world_size)
        causal = self.flops - self.attention_flops / 2
        return {
            "step": step.number,
            "attempt": self.context.attempt,
            "time": step.finished,
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/lr": step.lr,
            "train/tokens": self.tokens,
            "perf/wps": wps,
            "perf/mfu": 100 * wps * self.flops / self.peak if self.peak else None,
            "perf/mfu_causal": 100 * wps * causal / self.peak if self.peak else None,
            "perf/tflops": wps * self.flops / 1e12,
            "perf/step_time_s": seconds,
            "perf/data_time_s": waited,
            "perf/cpu_time_s": cpu,
            "perf/tokens_per_cpu_s": step.tokens / cpu if cpu and self.device.type == "cpu" else None,
            "perf/compile_time_s": ranks[:, 4].max().item(),
        }

    def _write(self, row: dict[str, Any]) -> None:
        assert self.events is not None
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            self.events.write(json.dumps(finite, allow_nan=False) + "\n")
            self.events.flush()
        except OSError as error:
            raise NotRecorded(f"cannot write {self.run_dir / EVENTS}: {error.strerror}") from error

    def _stop_if_not_finite(self, steps: list[_Step], rank_losses: Tensor, norms: list[float]) -> None:
        """Raise FloatingPointError for a loss or norm that is not finite: on every rank, as all see the same figures."""
        for i, step in enumerate(steps):
            what = f"gradient norm is {norms[i]} though the loss is finite"
            if wrong := (~rank_losses[:, i].isfinite()).nonzero().flatten().tolist():
                what = f"loss is {rank_losses[wrong[0], i].item()} on rank {wrong[0]}"
            if wrong or not math.isfinite(norms[i]):
                raise FloatingPointError(
                    f"step {step.number}: the {what}; this step's update was skipped and the run stops"
                )

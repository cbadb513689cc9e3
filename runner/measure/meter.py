"""Defines the meter, which measures every training step on every rank. Rank 0 appends a row per step to `events.jsonl`.

A step's loss and other metrics stay on the device at first. Every `log_every` steps, the host waits for the device and copies the
metrics of the latest steps. The ranks then exchange their measurements, and rank 0 writes the rows. `figures.py` defines which
work counts towards which figure. Starting and stopping the profiler counts towards no figure.
"""

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import calculate_time_spent

from meshrunner.recipes.errors import NotRecorded
from meshrunner.recipes.meter import EVALUATING, Phase
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.measure.compilation import compile_facts, recompile_reasons
from meshrunner.runner.measure.device import CudaDevice, HostDevice, peak_flops, peak_remark
from meshrunner.runner.measure.evaluations import reason_to_end, record
from meshrunner.runner.measure.rows import RANK_KEYS, ByRank, Rows, Step, merge_ranks, of_emulated, stop_if_not_finite
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.rundir import PlanRecord, Summary, add_layout
from meshrunner.runner.rundir.files import EVENTS, PLAN, SUMMARY

COLLECT_EVERY = 50
"""Steps between two runs of Python's garbage collector. Automatic garbage collection is disabled during training."""


class RunMeter:
    """The implementation of `meshrunner.recipes.meter.Meter`."""

    def __init__(self, experiment: Experiment, run_dir: Path, context: WorkerContext) -> None:
        self.experiment, self.run_dir, self.context = experiment, run_dir, context
        self.doing = context.doing
        self.step = 0
        """The current step, counted from 1; 0 before the first step of this attempt."""
        self.ended = False  # whether `eval.stop_after` ended the run before its last step
        self.pending: list[Step] = []
        self.data_time = 0.0
        self.tokens_before = 0
        self.resumed_at = 0
        self.compile_time = 0.0
        """Seconds spent compiling forward and backward graphs so far."""
        self.saves: list[float] = []
        self.save_before = 0.0
        self.startup_peaks: dict[str, float] = {}
        self.early_recompiles = 0
        self.late_recompiles: list[dict[str, Any]] = []
        self.by_rank = ByRank(1 if context.emulated else context.world_size)
        self.communication_s = PlanRecord.read(run_dir / PLAN).communication_s if context.emulated else None
        """Predicted seconds that an emulated rank would wait for communication in each step; None if unknown."""
        session = experiment.profiler.session
        if experiment.sweep.explain:
            from meshrunner.runner.explain.session import ExplainSession as session
        self.profiler = session(experiment.profiled, run_dir, context)
        self.events = (run_dir / EVENTS).open("a") if context.records else None

    def started(self, *, device: torch.device, params: int, describe_data: Callable[[], dict[str, Any]]) -> None:
        self.describe_data = describe_data
        self.device = CudaDevice(device) if device.type == "cuda" else HostDevice()
        self.device.release_cached()
        self.log_every = self.experiment.steps_between_read_outs(device.type)
        peak, facts = peak_flops(self.experiment, device, self.context)
        self.peak_rate = str(facts.get("peak_rate"))
        ranks, model, seq_len = self.context.world_size, self.experiment.model, self.experiment.seq_len
        data = describe_data() if self.context.records else {}
        flops = model.flops_per_token(seq_len).within(data.get("document_length", seq_len), seq_len)
        self.rows = Rows(self.context, flops, peak, self.tokens_before)
        if self.context.records:
            layout = {"device": facts["device"], "world_size": ranks}
            layout |= {"threads": self.context.threads, "torch": torch.__version__}
            add_layout(self.run_dir, self.context.attempt, self.experiment.model_dump(mode="json"), layout)
            facts |= {
                "model/params": params,
                "model/active_params": params - model.inactive_parameters(),
                "model/flops_per_token": flops.total,
                "world_size": ranks,
                "device_memory_gib": self.device.total_gib,
                "data": data,
            }
            self._add_to_summary(facts | self._pipeline_facts())
        self.profiler.started(device, self.resumed_at)
        compiles = self.experiment.compile.compiles
        self.first_phase: Phase = "compiling during the first step" if compiles else "the first step"
        self.doing(self.first_phase)
        self.window_begin, self.joules_before = time.perf_counter(), self.device.joules()
        self.step = self.resumed_at + 1
        self._begin_step()

    def _pipeline_facts(self) -> dict[str, Any]:
        layout = self.experiment.parallelism
        if layout.pipeline == 1:
            return {}
        from meshrunner.recipes.parallelism.pipeline.order import idle_share

        micro_batches = self.experiment.accumulation(layout.degrees(1, self.context.world_size).data)[1]
        idle = idle_share(layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches)
        return {"pipeline/idle_pct": 100 * idle, "pipeline/split": self.experiment.pipeline_split()}

    def resumed(self, step: int, tokens: int) -> None:
        self.resumed_at, self.tokens_before = step, tokens

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        since = time.perf_counter()
        with self.profiler.waiting_for_data():
            yield
        self.data_time += time.perf_counter() - since

    def step_done(
        self, step: int, *, loss: Tensor, grad_norm: Tensor, lr: float, tokens: int, observed: Mapping[str, Tensor]
    ) -> None:
        end, cpu_time = self.device.stamp(), time.process_time() - self.cpu_begin
        before, self.compile_time = self.compile_time, calculate_time_spent().get("total_wall_time", 0.0)
        compile_time = self.compile_time - before
        times = self.data_time, cpu_time, compile_time, self.save_before
        profiled = self.profiler.recording
        self.pending.append(Step(step, loss, grad_norm, lr, tokens, observed, *times, profiled, self.begin, end))
        self.data_time = self.save_before = 0.0
        self.profiler.pause()
        last_unmeasured = self.resumed_at + self.experiment.measure_after
        if compile_time and step > last_unmeasured:
            self._record_recompiles(step)
        # The first step ends the start-up, so its values are read immediately, regardless of log_every. Values are also read
        # before a profiler starts or stops: this needs an idle device, and its time must not count towards a step.
        first, last = step == self.resumed_at + 1, step == self.experiment.steps
        if first or last or step % self.log_every == 0 or self.profiler.turns_after(step):
            self._read_out()
        if first:
            self.doing("")
        self.context.steps[self.context.local_rank] = step
        with self._not_counted():
            figures = self.profiler.step_done(step)
            everyone = None if figures is None else self._gather(figures).tolist()
            if everyone is not None and self.context.records:
                self._add_to_summary(self.profiler.summary(everyone))
        if last:
            self._summarise()
        if step == last_unmeasured:
            self._begin_measuring()
        if step % COLLECT_EVERY == 0:
            gc.collect(1)
        self.step = step + 1
        self._begin_step()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._begin_measuring()
        yield
        self.device.keep_active_peak()

    @contextmanager
    def saving(self) -> Iterator[None]:
        with self._between_steps("saving a checkpoint"):
            since = time.perf_counter()
            yield
            self._gather([0.0])  # waits for the slowest rank
            self.save_before = time.perf_counter() - since
        self.saves.append(self.save_before)
        self._add_to_summary({"perf/checkpoint_time_s": median(self.saves)})

    def evaluate(self, step: int, loss: Callable[[], Tensor], tokens: int) -> bool:
        with self._between_steps(EVALUATING):
            since = time.perf_counter()
            with self.device.peaks_kept():
                mean = self._gather([loss().item()]).mean().item()
            if self.context.records:
                record(self.run_dir, self.context.attempt, step, mean, tokens, time.perf_counter() - since)
                self.ended = bool(reason_to_end(self.run_dir, self.experiment))
            self.ended = bool(self._gather([float(self.ended)])[0])
            if self.ended:
                self._summarise()
        self.compile_time = calculate_time_spent().get("total_wall_time", 0.0)  # compilation so far belongs to no step
        self.early_recompiles = len(recompile_reasons()) - len(self.late_recompiles)
        return self.ended

    @contextmanager
    def _between_steps(self, phase: Phase) -> Iterator[None]:
        """Exclude the work in the `with` block from all figures of steps."""
        self.doing(phase)
        self.profiler.pause()
        # Write the rows first. Otherwise, a crash could leave a checkpoint without the rows of the steps before it.
        if self.pending:
            self._read_out()
        if self.events is not None:
            os.fsync(self.events.fileno())
        with self._not_counted():
            joules = self.device.joules()
            yield
            self.joules_before += self.device.joules() - joules
        self.doing("" if self.step > self.resumed_at + 1 else self.first_phase)
        self._begin_step()

    def _summarise(self) -> None:
        """Add facts to summary.json that are known only at the end of the run."""
        if self.context.records:
            found = compile_facts(self.experiment.compile) if self.compile_time else {}
            self._add_to_summary(found | {"data": self.describe_data()})  # data may be packed during training
            self._add_to_summary(self.by_rank.summary(self.device.keys, self.ranks_memory))
            if self.rows.beyond_peak:
                self._add_to_summary({"peak_remark": peak_remark(self.peak_rate, self.context)})

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Exclude the time in the `with` block from WPS. If the device executes a step meanwhile, WPS is too high."""
        since = time.perf_counter()
        yield
        self.window_begin += time.perf_counter() - since

    def _begin_step(self) -> None:
        self.profiler.step_begins()
        self.begin, self.cpu_begin = self.device.stamp(), time.process_time()

    def _begin_measuring(self) -> None:
        """Write the memory peaks of the start-up to summary.json. Reset the peaks, so that they cover only later steps."""
        peaks = merge_ranks(self.device.keys, self._gather(self.device.peaks()))
        for key, value in peaks.items():
            self.startup_peaks[key] = max(value, self.startup_peaks.get(key, 0.0))
        found = {k.replace("memory/", "memory/startup_"): v for k, v in self.startup_peaks.items() if "_gib" in k}
        self._add_to_summary(found)
        self.device.reset_peaks()
        self.early_recompiles = len(recompile_reasons())

    def _record_recompiles(self, step: int) -> None:
        """Add the recompilations in measured steps (the steps after `measure_after`) to summary.json."""
        known = self.early_recompiles + len(self.late_recompiles)
        self.late_recompiles += [{"step": step, "reason": reason} for reason in recompile_reasons()[known:]]
        self._add_to_summary({"compile/late_recompiles": self.late_recompiles})

    def _add_to_summary(self, facts: dict[str, Any]) -> None:
        if self.context.records:
            path = self.run_dir / SUMMARY
            (Summary.read(path) | facts).write(path)

    def _gather(self, values: list[float]) -> Tensor:
        """Gather `values` from all ranks, or only from an emulated rank. Return an fp64 CPU tensor of shape [ranks, values]."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.context.emulated:
            return mine.unsqueeze(0)
        everyone = [torch.empty_like(mine) for _ in range(self.context.world_size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone)

    def _read_out(self) -> None:
        steps, self.pending = self.pending, []
        losses, norms, observed = self._on_host(steps)
        now, window_begin, self.window_begin = time.time(), self.window_begin, time.perf_counter()
        joules_before, self.joules_before = self.joules_before, self.device.joules()
        times = [now - self.device.seconds(step.end, steps[-1].end) for step in steps]
        per_step = [
            [loss, self.device.seconds(s.begin, s.end), s.data_time, s.cpu_time, s.compile_time, *others]
            for loss, others, s in zip(losses, observed, steps, strict=True)
        ]
        joules = self.joules_before - joules_before
        values = self._gather([*chain.from_iterable(per_step), *self.device.peaks(), joules])
        everyone, joules = values[:, :-1], values[:, -1].sum().item()
        ranks_steps = everyone[:, : -len(self.device.keys)].view(len(everyone), len(steps), -1)
        self.ranks_memory = everyone[:, -len(self.device.keys) :]
        if self.context.records:
            memory = self.device.row(merge_ranks(self.device.keys, self.ranks_memory))
            if steps[0].number == self.resumed_at + 1:
                self._add_to_summary(compile_facts(self.experiment.compile) if self.compile_time else {})
            window = self.window_begin - window_begin
            rows = self.rows.of(steps, norms, ranks_steps, window=window, times=times, joules=joules)
            if self.context.emulated:
                rows = [of_emulated(row, self.communication_s) for row in rows]
            for i, (step, row) in enumerate(zip(steps, rows, strict=True)):
                if step.number > self.resumed_at + self.experiment.measure_after and not step.profiled:
                    self.by_rank.add(ranks_steps[:, i, : len(RANK_KEYS)])
                self._write(row | memory | ({"profiled": True} if step.profiled else {}))
        if not self.context.emulated:
            stop_if_not_finite(steps, ranks_steps[:, :, 0], norms)

    def _on_host(self, steps: list[Step]) -> tuple[list[float], list[float], list[list[float]]]:
        """Wait for the device. Return three lists with an item per step: loss, gradient norm and values of `Network.observe`."""
        on_device = [(step.loss, step.grad_norm, *step.observed.values()) for step in steps]
        found = torch.stack([value.float() for values in on_device for value in values]).view(len(steps), -1).tolist()
        return [each[0] for each in found], [each[1] for each in found], [each[2:] for each in found]

    def _write(self, row: dict[str, Any]) -> None:
        assert self.events is not None
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            self.events.write(json.dumps(finite, allow_nan=False) + "\n")
            self.events.flush()
        except OSError as error:
            raise NotRecorded(f"cannot write {self.run_dir / EVENTS}: {error.strerror}") from error

"""Simulates when the events of a trace happen. The host issues work, and streams execute work in order and wait for each other.

An operator takes as long as its arithmetic or its memory traffic, whichever is longer (a roofline), plus a fixed overhead. Times
are in seconds since the clock started.
"""

import math
from functools import cache
from typing import NamedTuple

from meshrunner.runner.predict.record.trace_events import (
    COMPUTE,
    Collective,
    EventRecorded,
    HostWaited,
    Operator,
    PipelinePass,
    StreamWaitedForEvent,
    TraceEvent,
)
from meshrunner.runner.predict.timing.rates import Rates

PARTS = ("matmul", "attention", "memory", "optimizer", "communication")
"""Kinds of work in a step. `optimizer` includes all operators after backward, such as those of the gradient norm."""


class StepTime(NamedTuple):
    """Time of one step and of the work in that step (see `SpeedForecast`)."""

    seconds: float
    """Seconds from the previous step's end to this step's end, plus the time that compute loses to overlapped communication."""
    seconds_by_part: dict[str, float]
    """Seconds that streams spend on each kind of work in PARTS."""
    exposed_communication_s: float
    pipeline_idle_pct: float | None = None


class SimulatedClock:
    """Clock of one device and its host. The clock must receive the events of a trace in order."""

    def __init__(self, rates: Rates, tensor: int = 1) -> None:
        """Start a clock. tensor: with `compile.async_tensor_parallel`, the size of the tensor-parallel groups; else 1. Inductor
        can then fuse a collective with matmuls: all pieces of data except one move during the matmuls (Wang et al. 2023)."""
        self.rates, self._tensor = rates, tensor
        self._gather_s, self._matmul_s, self._copied = 0.0, 0.0, math.inf
        """Seconds of the last all-gather that later matmuls can hide; seconds of the last matmul; bytes that `cat` kernels read
        and wrote to reorder the matmul's result, or infinity if another operator or a collective followed the matmul."""
        self.host = 0.0
        """Time at which the host issues its next operation."""
        self._streams: dict[int, float] = {COMPUTE: 0.0}
        self._events: dict[int, float] = {}
        self._groups: dict[tuple[int, ...], float] = {}
        """Time at which each group of ranks finishes its collectives, which run one after another."""
        self._flops_per_second, self._collective_s = cache(rates.flops_per_second), cache(rates.collective_s)
        self.passes: dict[tuple[str, int, int], float] = {}
        """Seconds that each pass of the step took, keyed by (name, stage, micro batch). A running pass maps to its start."""
        self._step: int | None = None
        self._part = ""
        self.begin_step()

    def done_at(self, stream: int) -> float:
        """Return the time at which a stream finishes all work issued to it so far."""
        return self._streams.get(stream, 0.0)

    def take(self, event: TraceEvent) -> None:
        """Advance the clock by one event. Raise ConfigError if the device's rate for an operator is unknown."""
        if isinstance(event, Operator):
            self._enter(event)
            self._operator(event)
        elif isinstance(event, Collective):
            self._enter(event)
            self._collective(event)
        elif isinstance(event, EventRecorded):
            self._events[event.event] = self.done_at(event.stream)
        elif isinstance(event, StreamWaitedForEvent):
            # As in CUDA, a wait for an event that was never recorded returns at once.
            self._streams[event.stream] = max(self.done_at(event.stream), self._events.get(event.event, 0.0))
        elif isinstance(event, PipelinePass):
            key, now = event[:3], max(self.host, self.done_at(COMPUTE))
            self.passes[key] = now if event.begins else now - self.passes[key]
        elif isinstance(event, HostWaited):
            until = self._all_done_at() if event.event is None else self._events.get(event.event, 0.0)
            self.host = max(self.host, until)

    def begin_step(self) -> None:
        self._began = self._all_done_at()
        self._work = dict.fromkeys((*PARTS, "computing"), 0.0)
        """Seconds of each kind of work in PARTS. The key `computing` is for all operators on the compute stream."""
        self._micro_batches: list[dict[str, float]] = []
        """Results of `_totals()` at the start of each micro batch except the first."""
        self._since_collective = 0.0

    def step_time(self, skipped_micro_batches: int = 0) -> StepTime:
        """Return the time of the step so far. Each untraced micro batch adds the time of the second-last traced micro batch."""
        totals = self._totals()
        if skipped_micro_batches:
            before, after = self._micro_batches[-2:]
            for name in totals:
                totals[name] += skipped_micro_batches * (after[name] - before[name])
        seconds, communication = totals["seconds"], totals["communication"]
        # If the host is the bottleneck, compute idles for other reasons too, so cap the exposed time at the communication time.
        exposed = min(max(seconds - totals["computing"], 0.0), communication)
        seconds += self.rates.contention * (communication - exposed)
        return StepTime(seconds, {part: totals[part] for part in PARTS}, exposed)

    def _enter(self, event: Operator | Collective) -> None:
        """Enter the event's phase. If the event is the first of a step or a micro batch, begin that step or micro batch."""
        step, part, _ = event.phase
        if step != self._step:
            self._step = step
            self.begin_step()
        elif part == "forward" and self._part not in ("forward", "loss"):
            self._micro_batches.append(self._totals())
        self._part = part

    def _totals(self) -> dict[str, float]:
        """Return the seconds since the step began (key `seconds`), and the seconds of each kind of work."""
        return {"seconds": self._all_done_at() - self._began, **self._work}

    def _all_done_at(self) -> float:
        return max(self.host, *self._streams.values())

    def _operator(self, operator: Operator) -> None:
        name, kind, stream, phase, flops, dtype, nbytes = operator
        if not self.rates.overlaps:
            stream = COMPUTE
        seconds = nbytes / self.rates.bytes_per_second
        if flops and kind != "memory":
            seconds = max(seconds, flops / self._flops_per_second(kind, dtype))
        seconds += self.rates.kernel_s
        self.host += self.rates.host_s
        hidden = min(seconds, self._gather_s) if kind == "matmul" else 0.0
        self._streams[stream] = max(self.done_at(stream), self.host) + seconds - hidden
        part = kind.removesuffix("_backward")  # attention_backward counts as attention
        self._work["optimizer" if phase.part in ("update", "optimizer") else part] += seconds
        if stream == COMPUTE:
            self._work["computing"] += seconds
            self._since_collective += seconds
            if kind == "matmul":
                self._gather_s, self._matmul_s, self._copied = self._gather_s - hidden, seconds - hidden, 0.0
            else:
                puts_in_order = name.startswith("fused::cat")
                if not puts_in_order or self._copied < math.inf:  # only a `cat` before the matmul keeps the overlap
                    self._gather_s = 0.0
                self._copied += nbytes if puts_in_order else math.inf

    def _collective(self, collective: Collective) -> None:
        name, stream, phase, ranks, nbytes = collective
        if not self.rates.overlaps:
            stream = COMPUTE
        seconds = self._collective_s(name, ranks, nbytes) + self.rates.waiting_s(len(ranks), self._since_collective)
        self._since_collective = 0.0
        self.host += self.rates.host_s
        begins, hidden = max(self.done_at(stream), self._groups.get(ranks, 0.0), self.host), 0.0
        compiled = phase.block is not None  # only blocks are compiled
        if compiled and len(ranks) == self._tensor == ranks[-1] - ranks[0] + 1:
            if name == "all_gather":
                self._gather_s = seconds * (1 - 1 / self._tensor)
            elif name == "reduce_scatter" and self._copied <= 2 * nbytes:  # its input is one matmul's result
                hidden = min(seconds * (1 - 1 / self._tensor), self._matmul_s)
            self._copied = math.inf
        self._groups[ranks] = self._streams[stream] = begins + seconds - hidden
        self._work["communication"] += seconds

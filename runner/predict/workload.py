"""Traces a run, and predicts its step time on any device whose rates (FLOP/s, bytes/s) are known."""

import math
from dataclasses import dataclass, replace
from functools import partial
from types import UnionType
from typing import Any, Self

from meshrunner.runner.config.devices import ExpectedDevices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.predict.forecast import SpeedForecast
from meshrunner.runner.predict.gpu_libraries import gpu_libraries
from meshrunner.runner.predict.published import CUDNN_UNKNOWN, stated_error
from meshrunner.runner.predict.record.trace_events import Collective, EventLog, MemoryEvent
from meshrunner.runner.predict.timing.pipelined import TracedRanks, traced_ranks
from meshrunner.runner.predict.timing.rates import CPURates, Fp32Rate, GPURates
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock, StepTime
from meshrunner.runner.predict.trace.depth import Depths, shallow_depths
from meshrunner.runner.predict.trace.tracer import Trace, trace_depths


@dataclass(frozen=True)
class Workload:
    """Traced work of one training step. `step_time` predicts how long a given device needs for a step."""

    experiment: Experiment
    workers: int
    """Processes per node."""
    tokens: float
    """Tokens per step and device."""
    skipped_micro_batches: int
    """Number of untraced micro batches per step. `step_time` includes an estimate of their time."""
    events: tuple[EventLog, ...]
    """One event log if the full-depth model was traced, or two if two shallow models (with fewer blocks) were traced instead.
    With a pipeline, one event log per traced rank."""
    depths: Depths | None
    """Numbers of blocks in the two shallow models; None if the full-depth model was traced."""
    pipeline: TracedRanks | None
    """The traced pipeline ranks, one for each event log; None without a pipeline."""
    exchanged: int

    @property
    def fp32_rate(self) -> Fp32Rate:
        """Key in `hardware.peak` for the rate of the run's fp32 matmuls: `tf32` if the run allows TF32, else `fp32`."""
        return "fp32" if self.experiment.precision.fp32_matmul == "highest" else "tf32"

    def clock(self, hardware: GPU | CPU) -> SimulatedClock:
        """Return a clock for a device. For a CPU, `hardware.speed` must be set."""
        if isinstance(hardware, CPU):
            return SimulatedClock(CPURates(hardware))
        rates = GPURates(hardware, self.fp32_rate, self.workers)
        if self.experiment.compile.cuda_graph:
            rates.host_s = 0.0  # the host issues one graph per step
        overlaps = self.experiment.compile.async_tensor_parallel
        return SimulatedClock(rates, self.experiment.parallelism.tensor if overlaps else 1)

    def without(self, kind: type[Any] | UnionType) -> Self:
        events = [[event for event in log if not isinstance(event, kind)] for log in self.events]
        return replace(self, events=tuple(events))

    def step_time(self, hardware: GPU | CPU) -> StepTime:
        """Return the predicted time of a step on a device. Raise ConfigError if the device's rate for an operator is unknown."""
        clocks = []
        for events in self.events:
            clock = self.clock(hardware)
            for event in events:
                clock.take(event)
            clocks.append(clock)
        if self.pipeline is not None:
            return self.pipeline.step_time(clocks, self.exchanged)
        times = [clock.step_time(self.skipped_micro_batches) for clock in clocks]
        return times[0] if self.depths is None else _at_full_depth(self.depths, *times)

    def wps(self, hardware: GPU | CPU) -> float:
        """Return the predicted tokens per second per device. Raise ConfigError in the same cases as `step_time`."""
        return self.tokens / self.step_time(hardware).seconds

    def speed(self, hardware: GPU | CPU) -> SpeedForecast:
        """Return the predicted tokens per second, MFU and step time. Raise ConfigError in the same cases as `step_time`."""
        experiment, step_time = self.experiment, self.step_time(hardware)
        wps = self.tokens / step_time.seconds
        compute = experiment.precision.compute
        peak = hardware.peak_tflops(self.fp32_rate if compute == "fp32" else compute)
        flops = experiment.model.flops_per_token(experiment.seq_len).total
        error_pct, error_basis = stated_error(experiment, hardware, experiment.launch.nodes * self.workers)
        cudnn = any("cudnn_attention" in getattr(each, "name", "") for each in self.events[0])
        if cudnn and hardware.calibrated is None:
            error_pct += math.ceil(100 * step_time.seconds_by_part["attention"] / step_time.seconds)
            error_basis += CUDNN_UNKNOWN
        if experiment.data.separates_documents:
            error_basis += ". MFU counts attention as if each document filled a whole sequence"
        return SpeedForecast(
            wps=wps,
            mfu=None if peak is None else 100 * wps * flops / (peak * 1e12),
            step_time_s=step_time.seconds,
            seconds_by_part=step_time.seconds_by_part,
            exposed_communication_s=step_time.exposed_communication_s,
            pipeline_idle_pct=step_time.pipeline_idle_pct,
            calibrated=hardware.calibrated is not None,
            error_pct=error_pct,
            error_basis=error_basis,
        )


def trace_run(
    experiment: Experiment, device: ExpectedDevices, *, shallow: bool
) -> tuple[Workload, dict[int, tuple[Trace, ...]]]:
    """Trace the model, or two copies with fewer blocks if `shallow` is true and `shallow_depths` returns depths for the model.

    Also return, keyed by rank, the traces of the ranks whose memory is predicted (see `Forecast.rank`).
    """
    blocks = len(experiment.model.on_meta(experiment.seq_len).block_names()) if shallow else 0
    depths = shallow_depths(experiment, blocks) if shallow else None
    models = [experiment.model] if depths is None else map(experiment.model.at_depth, depths[:2])
    recipes = [experiment.model_copy(update={"model": model}) for model in models]
    nodes, workers, emulated = experiment.launch.nodes, device.workers, experiment.launch.emulate
    degrees = experiment.parallelism.degrees(nodes, workers)
    pipeline = traced_ranks(experiment, nodes * workers, experiment.accumulation(degrees.data)[1], emulated)
    libraries = gpu_libraries(experiment, device.hardware)
    trace = partial(trace_depths, recipes, nodes=nodes, workers=workers, device_type=device.type, libraries=libraries)
    traces = {rank: trace(rank) for rank in ([0] if pipeline is None else pipeline.traced.values())}
    first, events = traces[0][0], tuple(each.events for own in traces.values() for each in own)
    tokens = first.tokens / (degrees.tensor * degrees.pipeline)
    skipped, exchanged = first.skipped_micro_batches, first.exchanged
    workload = Workload(experiment, workers, tokens, skipped, events, depths, pipeline, exchanged)
    return workload, traces if pipeline is None or emulated is None else {emulated: traces[emulated]}


def trace_workload(experiment: Experiment, device: ExpectedDevices) -> Workload:
    """Trace a run whose step time was measured. Drop memory events, so that predictions are faster. If the run emulates a rank,
    also drop collectives, because an emulated rank does not wait for other ranks."""
    workload, traces = trace_run(experiment.on(device.type), device, shallow=True)
    if experiment.launch.emulate is None:
        return workload.without(MemoryEvent)
    own = tuple(each.events for of_rank in traces.values() for each in of_rank)
    return replace(workload, pipeline=None, events=own).without(MemoryEvent | Collective)


def _at_full_depth(depths: Depths, shallow: StepTime, deeper: StepTime) -> StepTime:
    """Extrapolate the step times of two shallow models to the full depth. Step time is linear in the number of blocks."""
    line = depths.at_full_depth
    return StepTime(
        line(shallow.seconds, deeper.seconds),
        {part: line(shallow.seconds_by_part[part], value) for part, value in deeper.seconds_by_part.items()},
        max(0.0, line(shallow.exposed_communication_s, deeper.exposed_communication_s)),
    )

"""
Predicts one run: whether it fits, how much memory it holds at its peak, and how fast it is.

The run is traced on the meta device. For a GPU, the trace is replayed through a model of the caching allocator; for a CPU, or
with `active_only`, the memory that tensors hold decides.
"""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.allocator_env import in_effect, that_counts
from meshrunner.runner.config.devices import ExpectedDevices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.ledger.allocations import PeakMemory
from meshrunner.runner.own_code import fault
from meshrunner.runner.predict.activations import largest_block_bytes
from meshrunner.runner.predict.allocator.alloc_conf import AllocatorSettings
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator
from meshrunner.runner.predict.forecast import Forecast, MemoryForecast
from meshrunner.runner.predict.replay.allocations import InstantClock, Replayed, replay
from meshrunner.runner.predict.replay.timeline import changes_without_allocator, timeline
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock, StepTime
from meshrunner.runner.predict.trace.depth import Depths, extrapolate, start_peak, step_peak
from meshrunner.runner.predict.trace.faults import needs_memory, why
from meshrunner.runner.predict.trace.tracer import Trace
from meshrunner.runner.predict.verdict import GIB, NOT_PLANNED, Verdict, explain, judge
from meshrunner.runner.predict.workload import Workload, not_planned, trace_run, workload_of

ACTIVE_ERROR_PCT = 2.0
RESERVED_ERROR_PCT = 8.0
"""Bounds of the differences from published measurements, docs/measurements/plan.md."""


class _Memory(NamedTuple):
    """Answer on memory, and the results of its replay."""

    verdict: Verdict
    forecast: MemoryForecast
    replayed: Replayed | None = None
    """Replay with unlimited memory; None where no allocator is modelled."""
    step_time: StepTime | None = None
    """None where nothing was replayed or the device's speed is unknown."""


def predict(
    experiment: Experiment, device: ExpectedDevices, *, active_only: bool = False, with_timeline: bool = False
) -> Forecast:
    """
    Predict a run that fits its devices (see `fit`).

    Args:
        active_only: trace only two shallow models, which is faster but does not predict reserved memory.
        with_timeline: also return memory over the last step, for which the model is traced at full depth in any case.

    Raises:
        ConfigError: the configuration is wrong.
        Exception: raised by a class of the user's (see `own_code.fault`).
    """
    experiment = experiment.on(device.type)
    if reason := not_planned(experiment):
        return Forecast(Verdict(NOT_PLANNED, reason))
    settings, remarks = allocator_settings(experiment) if device.type == "cuda" else (AllocatorSettings(), [])
    try:
        shallow = active_only and not with_timeline
        depths, traces = trace_run(experiment, device, shallow=shallow, operators=with_timeline)
    except ConfigError:
        raise
    except Exception as error:  # a class of the user's may raise anything, and an operator may lack a kernel for meta
        if not needs_memory(error) and fault(error):
            raise
        return Forecast(Verdict(NOT_PLANNED, f"it cannot be traced: {why(error)}"))
    workload = workload_of(experiment, device, depths, traces)
    hardware = device.hardware
    if hardware is not None and (missing := workload.missing_rate(hardware)):
        remarks.append(missing)
        hardware = None
    if device.type == "cuda" and not active_only:
        memory = _reserved_memory(workload, device, hardware, settings, traces[0], record_changes=with_timeline)
    else:
        memory = _active_memory(device, depths, traces)
    speed = None
    if hardware is not None:
        speed = workload.speed(hardware, memory.step_time or workload.step_time(hardware))
    over_time = None
    if with_timeline:
        changes = memory.replayed.changes if memory.replayed else changes_without_allocator(traces[0].events)
        over_time = timeline(changes, traces[0].last_step, _capacity(device), round(device.memory_gib * GIB))
    return Forecast(memory.verdict, memory.forecast, speed, tuple(remarks), over_time)


def allocator_settings(experiment: Experiment) -> tuple[AllocatorSettings, list[str]]:
    """
    Return the allocator settings of workers on GPUs, and a sentence for each setting that is not modelled.

    Raises:
        ConfigError: torch would refuse them.
    """
    name, text = that_counts(in_effect(experiment.launch.env))
    try:
        settings = AllocatorSettings.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    return settings, [f"{name}: {each} is not modelled" for each in settings.ignored]


def _capacity(device: ExpectedDevices) -> int:
    """Return the bytes of the device's memory that torch can have."""
    elsewhere = device.hardware.reserved_elsewhere_gib if isinstance(device.hardware, GPU) else 0.0
    return max(0, round((device.memory_gib - elsewhere) * GIB))


def _active_memory(device: ExpectedDevices, depths: Depths | None, traces: tuple[Trace, ...]) -> _Memory:
    """Judge by the memory that tensors hold."""
    if depths is None:
        (trace,) = traces
        peak, startup = step_peak(trace), start_peak(trace)
    else:
        shallow, deeper = traces
        startup, peak = extrapolate(depths, shallow, deeper)
    capacity, needed = _capacity(device), max(peak.total, startup)
    # The categories at start-up are not known at full depth.
    kind, by_category = ("active", peak.by_category) if peak.total >= startup else ("active at start-up", {})
    verdict = Verdict(
        judge(needed, capacity, ACTIVE_ERROR_PCT / 100, lambda nbytes: needed <= nbytes),
        explain(kind, needed, capacity, device.name, by_category),
    )
    block = largest_block_bytes(traces[-1])
    return _Memory(verdict, _memory_forecast(device, peak, startup, block, ACTIVE_ERROR_PCT))


def _reserved_memory(
    workload: Workload,
    device: ExpectedDevices,
    hardware: GPU | CPU | None,
    settings: AllocatorSettings,
    trace: Trace,
    *,
    record_changes: bool,
) -> _Memory:
    """Judge by the memory that the allocator reserves; without `hardware`, freed memory is reusable at once."""

    def clock() -> SimulatedClock | InstantClock:
        return InstantClock() if hardware is None else workload.clock(hardware)

    def replay_within(nbytes: int) -> Replayed:
        return replay(trace.events, clock(), CachingAllocator(nbytes, settings))

    clock_of_step = clock()
    unlimited = CachingAllocator(None, settings)
    replayed = replay(trace.events, clock_of_step, unlimited, record_changes=record_changes)
    capacity, needed = _capacity(device), replayed.peak_reserved.nbytes
    limited = replayed if needed <= capacity else replay_within(capacity)
    peak = PeakMemory(replayed.peak_active.nbytes, replayed.by_category, replayed.peak_active.phase)
    flushes = None if limited.failed else limited.retries
    verdict = Verdict(
        judge(needed, capacity, RESERVED_ERROR_PCT / 100, lambda nbytes: replay_within(nbytes).failed is None),
        explain("reserved", needed, capacity, device.name, peak.by_category, flushes),
    )
    startup, block = replayed.startup_active, largest_block_bytes(trace)
    forecast = _memory_forecast(device, peak, startup, block, RESERVED_ERROR_PCT, needed, limited.retries)
    return _Memory(verdict, forecast, replayed, clock_of_step.step_time(workload.skipped_micro_batches))


def _memory_forecast(
    device: ExpectedDevices,
    peak: PeakMemory,
    startup: int,
    block: int | None,
    error_pct: float,
    reserved: int | None = None,
    retries: int | None = None,
) -> MemoryForecast:
    memory = device.memory_gib * GIB
    return MemoryForecast(
        peak_active_gib=peak.total / GIB,
        peak_active_pct=100 * peak.total / memory,
        peak_reserved_gib=None if reserved is None else reserved / GIB,
        peak_reserved_pct=None if reserved is None else 100 * reserved / memory,
        alloc_retries=retries,
        startup_gib=startup / GIB,
        phase=str(peak.phase),
        by_category_gib={name: nbytes / GIB for name, nbytes in peak.by_category.items()},
        block_gib=None if block is None else block / GIB,
        error_pct=error_pct,
    )

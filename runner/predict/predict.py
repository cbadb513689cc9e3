"""Predicts one run: whether it fits, how much memory it holds at its peak, and how fast it is.

For a GPU, the trace is replayed through a model of the caching allocator. The run fits if the GPU has room for the
memory that the allocator reserves. For a CPU, the run fits if there is room for the active memory: the memory of tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.devices import ExpectedDevices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.config.launch_env import allocator_setting, allocator_variables
from meshrunner.runner.ledger.allocations import PeakMemory
from meshrunner.runner.own_code import fault
from meshrunner.runner.predict.activations import largest_block_bytes
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator, allocator_settings
from meshrunner.runner.predict.allocator.segments import GIB
from meshrunner.runner.predict.forecast import (
    BORDERLINE,
    DOES_NOT_FIT,
    FITS,
    NEEDS_VALUES,
    Forecast,
    MemoryForecast,
    Verdict,
    explain,
    judge,
    not_planned,
    why,
)
from meshrunner.runner.predict.record.trace_events import MemoryEvent
from meshrunner.runner.predict.replay.replay import Clock, InstantClock, Replayed, replay
from meshrunner.runner.predict.replay.timeline import points_without_allocator, timeline
from meshrunner.runner.predict.trace.depth import extrapolate, start_peak, step_peak
from meshrunner.runner.predict.trace.tracer import Trace
from meshrunner.runner.predict.workload import Workload, trace_run

ACTIVE_ERROR_PCT, RESERVED_ERROR_PCT = 2.0, 8.0
"""Bounds on the errors of the predicted peaks of active and reserved memory, in percent (from docs/measurements/plan.md)."""
REACH = 0.25
"""`predict` predicts no speed for `variants` if the run needs more than (1 + REACH) x the device's memory. A run that needs
less may fit after all, because predictions have errors."""
RESERVED_PER_ACTIVE, PARTLY_USED = 2.5, 2**28
"""Upper bound on reserved memory: 2.5 x active memory, plus 2**28 bytes for mostly unused segments. The largest observed ratio
of reserved to active memory is 2.29 in predictions (see docs/measurements/plan.md) and 1.37 in published runs."""


def predict(
    experiment: Experiment,
    device: ExpectedDevices,
    *,
    active_only: bool = False,
    with_timeline: bool = False,
    variants: Sequence[GPU | CPU] = (),
) -> Forecast:
    """Predict a run that passed `consistency.fit`. Exceptions of user classes propagate, except those due to the meta device.

    `active_only` skips reserved memory if active memory alone shows whether the run fits. `active_only` is faster, because it
    traces two models with fewer blocks if possible. `with_timeline` adds memory over time, and traces the full model.
    The speed is also predicted for each of `variants` (see REACH), which are copies of the device with other rates.
    """
    experiment = experiment.on(device.type)
    if reason := experiment.untraceable():
        return not_planned(reason)
    expandable, remarks = False, list[str]()
    if device.type == "cuda":
        expandable, remarks = allocator_settings(*allocator_setting(allocator_variables(experiment.launch.env)))
    try:
        workload, traces = trace_run(experiment, device, shallow=active_only and not with_timeline)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything, and an operator may lack a meta kernel
        if not NEEDS_VALUES.search(str(error)) and fault(error):
            raise
        return not_planned(f"the model cannot be traced: {why(error)}")
    hardware, speed = device.hardware, None
    if hardware is not None:
        try:
            speed = workload.speed(hardware)
        except ConfigError as error:  # a rate is unknown
            remarks.append(str(error))
            hardware = None
    with_reserved = device.type == "cuda" and not active_only
    if not with_reserved:
        worst = max((_active_memory(workload, device, rank, own) for rank, own in traces.items()), key=_need)
        with_reserved = device.type == "cuda" and worst.verdict.answer == BORDERLINE
    if with_reserved:
        if workload.depths is not None:  # a replay needs the trace of the full model
            return predict(experiment, device, with_timeline=with_timeline, variants=variants)
        clock: Callable[[], Clock] = InstantClock if hardware is None else partial(workload.clock, hardware)
        judged = partial(_reserved_memory, device, clock, expandable, with_timeline)
        worst = max((judged(rank, *own) for rank, own in traces.items()), key=_need)
    rank, verdict, memory, replayed = worst
    over_time = None
    if with_timeline:
        trace = traces[rank][0]
        points = replayed.points if replayed else points_without_allocator(trace.events, trace.last_step)
        over_time = timeline(points, _capacity(device), round(device.memory_gib * GIB))
    wps_on: tuple[float, ...] = ()
    near = verdict.answer != DOES_NOT_FIT or _need(worst)[1] * GIB <= (1 + REACH) * _capacity(device)
    if variants and speed is not None and near:
        wps_on = tuple(map(workload.without(MemoryEvent).wps, variants))
    return Forecast(verdict, memory, speed, tuple(remarks), over_time, wps_on, rank)


class _Judged(NamedTuple):
    """Verdict and predicted memory of a rank."""

    rank: int
    verdict: Verdict
    memory: MemoryForecast
    replayed: Replayed | None = None


def _need(judged: _Judged) -> tuple[int, float]:
    """Return a sort key that is largest for the worst verdict or, among equal verdicts, for the most memory."""
    memory = judged.memory
    needed = memory.peak_reserved_gib or max(memory.peak_active_gib, memory.startup_gib)
    return (FITS, BORDERLINE, DOES_NOT_FIT).index(judged.verdict.answer), needed


def _capacity(device: ExpectedDevices) -> int:
    elsewhere = device.hardware.reserved_elsewhere_gib if isinstance(device.hardware, GPU) else 0.0
    return max(0, round((device.memory_gib - elsewhere) * GIB))


def _active_memory(workload: Workload, device: ExpectedDevices, rank: int, traces: tuple[Trace, ...]) -> _Judged:
    if workload.depths is None:
        startup, peak = start_peak(traces[0]), step_peak(traces[0])
    else:
        startup, peak = extrapolate(workload.depths, *traces)
    capacity, needed = _capacity(device), max(peak.total, startup)
    # `start_peak` and `extrapolate` return start-up memory only in total, not by category.
    kind, by_category = ("active", peak.by_category) if peak.total >= startup else ("active at start-up", {})
    answer = judge(needed, capacity, ACTIVE_ERROR_PCT / 100, lambda nbytes: needed <= nbytes)
    if device.type == "cuda" and answer != DOES_NOT_FIT and needed * RESERVED_PER_ACTIVE + PARTLY_USED > capacity:
        answer = BORDERLINE
    verdict = Verdict(answer, explain(kind, needed, capacity, device.name, by_category))
    return _Judged(rank, verdict, _memory_forecast(device, peak, startup, traces[-1]))


def _reserved_memory(
    device: ExpectedDevices, clock: Callable[[], Clock], expandable: bool, with_points: bool, rank: int, trace: Trace
) -> _Judged:
    """Judge a run by the memory that the allocator reserves. `clock`: function that returns a new clock."""

    def replay_within(nbytes: int | None) -> Replayed:
        allocator = CachingAllocator(nbytes, expandable=expandable)
        return replay(trace.events, clock(), allocator, record_points=with_points and nbytes is None)

    replayed = replay_within(None)
    capacity, needed = _capacity(device), replayed.peak_reserved
    limited = replayed if needed <= capacity else replay_within(capacity)
    flushes = limited.retries if limited.completed else None
    verdict = Verdict(
        judge(needed, capacity, RESERVED_ERROR_PCT / 100, lambda nbytes: replay_within(nbytes).completed),
        explain("reserved", needed, capacity, device.name, replayed.peak.by_category, flushes),
    )
    forecast = replace(
        _memory_forecast(device, replayed.peak, replayed.startup_active, trace),
        peak_reserved_gib=needed / GIB,
        peak_reserved_pct=100 * needed / (device.memory_gib * GIB),
        alloc_retries=limited.retries,
        error_pct=RESERVED_ERROR_PCT,
    )
    return _Judged(rank, verdict, forecast, replayed)


def _memory_forecast(device: ExpectedDevices, peak: PeakMemory, startup: int, trace: Trace) -> MemoryForecast:
    """Return the forecast of active memory. The fields about the allocator are None."""
    # With a pipeline, a block may keep activations of several micro batches, which run before the block's first backward.
    block = None if trace.exchanged else largest_block_bytes(trace)
    return MemoryForecast(
        peak_active_gib=peak.total / GIB,
        peak_active_pct=100 * peak.total / (device.memory_gib * GIB),
        peak_reserved_gib=None,
        peak_reserved_pct=None,
        alloc_retries=None,
        startup_gib=startup / GIB,
        phase=str(peak.phase),
        by_category_gib={name: nbytes / GIB for name, nbytes in peak.by_category.items()},
        block_gib=None if block is None else block / GIB,
        error_pct=ACTIVE_ERROR_PCT,
    )

"""The prediction of a run: whether it fits, what it holds when it holds most, how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.devices import Described
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.plan.alloc_conf import Settings
from meshrunner.runner.plan.allocator import Allocator
from meshrunner.runner.plan.clock import StepClock, Timed
from meshrunner.runner.plan.depth import Depths, extrapolate, rehearse_shallow, shallow_depths, start_peak, step_peak
from meshrunner.runner.plan.rehearse import Rehearsal, rehearse
from meshrunner.runner.plan.replay import Change, Replayed, replay
from meshrunner.runner.plan.timeline import Timeline, changes_of, timeline
from meshrunner.runner.plan.verdict import GIB, NOT_PLANNED, Verdict, answer, reason
from meshrunner.runner.profiler.account import Peak

ACTIVE_ERROR_PCT = 2.0
RESERVED_ERROR_PCT = 8.0
"""Largest differences from published measurements, docs/measurements/plan.md."""
SPEED_ERROR_PCT = 5.0
"""The same of words per second, with shares of the peak rates that were fitted to no run of the device."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MEMORY = (
    "memory/peak_active_gib",
    "memory/peak_active_pct",
    "memory/peak_reserved_gib",
    "memory/peak_reserved_pct",
    "memory/alloc_retries",
    "memory/startup_gib",
    "memory/phase",
    "memory/by_category_gib",
    "memory/error_pct",
)
SPEED = (
    "perf/wps",
    "perf/mfu",
    "perf/step_time_s",
    "perf/seconds_by_part",
    "perf/exposed_communication_s",
    "perf/calibrated",
    "perf/error_pct",
)


class Prediction(NamedTuple):
    """The answer, and its figures by their keys in JSON: of MEMORY and SPEED, None where they are not known."""

    verdict: Verdict
    figures: dict[str, Any]
    over_time: Timeline | None = None
    """Memory over the last step, where it was asked for."""

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {"verdict": self.verdict.answer, "reason": self.verdict.reason, "rank": 0, **self.figures}


def predict(
    experiment: Experiment, device: Described, *, active_only: bool = False, over_time: bool = False
) -> Prediction:
    """
    Predict a run that fits its devices (see `fit`).

    Args:
        active_only: only two shallow models are rehearsed: faster, and no word on what the allocator reserves.
        over_time: also memory over the last step; then the model is rehearsed at full depth in any case.

    Raises:
        ConfigError: the configuration is wrong.
    """
    experiment = experiment.on(device.type)
    if why := not_planned(experiment):
        return Prediction(Verdict(NOT_PLANNED, why), dict.fromkeys((*MEMORY, *SPEED)))
    rehearsal = partial(
        rehearse,
        nodes=experiment.launch.nodes,
        workers=device.workers,
        device_type=device.type,
        operators=device.hardware is not None or over_time,
    )
    depths = None
    if active_only and not over_time:
        depths = shallow_depths(experiment, len(experiment.model.on_meta(experiment.seq_len).block_names()))
    capacity = round((device.memory_gib - (device.hardware.reserved_elsewhere_gib if device.hardware else 0)) * GIB)
    if depths is None:
        return _at_full_depth(experiment, device, capacity, rehearsal(experiment), active_only, over_time)
    return _from_shallow(experiment, device, capacity, depths, rehearsal)


def not_planned(experiment: Experiment) -> str | None:
    """Why a run cannot be predicted; None: it can."""
    layout = experiment.parallelism
    if getattr(layout, "cpu_offload", False):
        return (
            "cpu_offload moves parameters between host and device, and FSDP2 refuses to rehearse that without a device"
        )
    if layout.kind == "megatron_fsdp":
        return "megatron_fsdp is not torch's, and cannot be rehearsed without a GPU"
    return None


def _at_full_depth(
    experiment: Experiment, device: Described, capacity: int, full: Rehearsal, active_only: bool, over_time: bool
) -> Prediction:
    peak, timed, replayed = step_peak(full), None, None
    changes: list[Change] = []
    if device.type == "cuda" and not active_only:
        replayed, timed = _replayed(full, experiment, device, None, changes if over_time else None)
        needed, what, error = replayed.peak_reserved.nbytes, "reserved", RESERVED_ERROR_PCT

        def runs_in(nbytes: int) -> bool:
            return _replayed(full, experiment, device, nbytes)[0].failed is None

        capped = replayed if needed <= capacity else _replayed(full, experiment, device, capacity)[0]
        retries = capped.retries
        startup = replayed.startup_active
        peak = Peak(replayed.peak_active.nbytes, peak.by_category, replayed.peak_active.phase)
    else:
        needed, what, error = peak.total, "active", ACTIVE_ERROR_PCT
        retries, startup = None, start_peak(full)
        timed = _timed(full, experiment, device)

        def runs_in(nbytes: int) -> bool:
            return needed <= nbytes

    verdict = Verdict(
        answer(needed, capacity, error / 100, runs_in), reason(what, needed, capacity, device.name, peak.by_category)
    )
    memory = _memory(device, peak, replayed, retries, startup, error)
    drawn = None
    if over_time:
        drawn = timeline(changes or changes_of(full.log), full.last_step, capacity, round(device.memory_gib * GIB))
    return Prediction(verdict, memory | _speed(experiment, device, full.tokens, timed), drawn)


def _from_shallow(
    experiment: Experiment, device: Described, capacity: int, depths: Depths, rehearsal: Callable[[Any], Rehearsal]
) -> Prediction:
    shallow, deeper = rehearse_shallow(depths, experiment, rehearsal)
    deep = extrapolate(depths, shallow, deeper)
    timed = None
    if device.hardware is not None:
        first, second = (_timed(each, experiment, device) for each in (shallow, deeper))
        assert first is not None and second is not None
        timed = _deep_time(depths, first, second)
    needed, peak = deep.peak.total, deep.peak
    verdict = Verdict(
        answer(needed, capacity, ACTIVE_ERROR_PCT / 100, lambda nbytes: needed <= nbytes),
        reason("active", needed, capacity, device.name, peak.by_category),
    )
    memory = _memory(device, peak, None, None, deep.start, ACTIVE_ERROR_PCT)
    return Prediction(verdict, memory | _speed(experiment, device, deeper.tokens, timed))


def _clock(experiment: Experiment, device: Described) -> StepClock:
    assert device.hardware is not None
    return StepClock(device.hardware, _rate_of_fp32(experiment))


def _rate_of_fp32(experiment: Experiment) -> Literal["fp32", "tf32"]:
    """The field of `hardware.peak` that products of fp32 are multiplied at."""
    return "fp32" if getattr(experiment.precision, "matmul", "highest") == "highest" else "tf32"


class _NoClock:
    """For a device whose speed is not known: all that is freed is free at once."""

    host = 0.0

    def passed(self, stream: int) -> float:
        return 0.0

    def take(self, entry: Any) -> None:
        """Nothing takes time."""


def _replayed(
    full: Rehearsal,
    experiment: Experiment,
    device: Described,
    capacity: int | None,
    changes: list[Change] | None = None,
) -> tuple[Replayed, Timed | None]:
    env = experiment.launch.env
    try:
        settings = Settings.parse(next((env[name] for name in ALLOCATOR_SETTINGS if name in env), ""))
    except ValueError as error:
        raise ConfigError(f"launch.env: the allocator's settings: {error}") from error
    if device.hardware is None:
        return replay(full.log, _NoClock(), Allocator(capacity, settings), changes), None
    clock = _clock(experiment, device)
    replayed = replay(full.log, clock, Allocator(capacity, settings), changes)
    return replayed, clock.step_ends()


def _timed(rehearsal: Rehearsal, experiment: Experiment, device: Described) -> Timed | None:
    """The time of the last step alone, without its memory."""
    if device.hardware is None:
        return None
    clock = _clock(experiment, device)
    for entry in rehearsal.log:
        clock.take(entry)
    return clock.step_ends()


def _deep_time(depths: Depths, shallow: Timed, deeper: Timed) -> Timed:
    blocks = (depths.full - depths.deeper) / (depths.deeper - depths.shallow)

    def line(first: float, second: float) -> float:
        return second + blocks * (second - first)

    return Timed(
        line(shallow.seconds, deeper.seconds),
        {part: line(shallow.seconds_by_part[part], value) for part, value in deeper.seconds_by_part.items()},
        max(0.0, line(shallow.exposed_communication_s, deeper.exposed_communication_s)),
    )


def _memory(
    device: Described, peak: Peak, replayed: Replayed | None, retries: int | None, startup: int, error: float
) -> dict[str, Any]:
    reserved = replayed.peak_reserved.nbytes if replayed is not None else None
    memory = device.memory_gib * GIB
    values = (
        peak.total / GIB,
        100 * peak.total / memory,
        None if reserved is None else reserved / GIB,
        None if reserved is None else 100 * reserved / memory,
        retries,
        startup / GIB,
        str(peak.phase),
        {name: nbytes / GIB for name, nbytes in peak.by_category.items()},
        error,
    )
    return dict(zip(MEMORY, values, strict=True))


def _speed(experiment: Experiment, device: Described, tokens: int, timed: Timed | None) -> dict[str, Any]:
    """
    Figures of SPEED.

    Args:
        tokens: of a step, of one data-parallel rank, whose work `tensor` devices share.
    """
    if timed is None or device.hardware is None:
        return dict.fromkeys(SPEED)
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, device.workers)
    wps = tokens / degrees.tensor / timed.seconds
    compute = experiment.precision.compute
    rate = _rate_of_fp32(experiment) if compute == "fp32" else compute
    peak = device.hardware.peak_tflops(rate)
    flops = experiment.model.flops_per_token(experiment.seq_len).total
    values = (
        wps,
        None if peak is None else 100 * wps * flops / (peak * 1e12),
        timed.seconds,
        timed.seconds_by_part,
        timed.exposed_communication_s,
        False,
        SPEED_ERROR_PCT,
    )
    return dict(zip(SPEED, values, strict=True))

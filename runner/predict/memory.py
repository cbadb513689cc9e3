"""What is said of a run's memory: the verdict, and the figures of MEMORY."""

from __future__ import annotations

from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.allocator import in_effect, that_counts
from meshrunner.runner.config.devices import Described
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.ledger.memory_ledger import PeakMemory
from meshrunner.runner.predict.allocator.alloc_conf import AllocatorSettings
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator
from meshrunner.runner.predict.kept import most_added
from meshrunner.runner.predict.replay.memory import replay
from meshrunner.runner.predict.replay.peaks import Change, Replayed
from meshrunner.runner.predict.speed import Rehearsed
from meshrunner.runner.predict.timing.clock import Timed
from meshrunner.runner.predict.trace.depth import Depths, extrapolate, start_peak, step_peak
from meshrunner.runner.predict.trace.tracer import Trace
from meshrunner.runner.predict.verdict import GIB, MEMORY, Verdict, answer, reason

ACTIVE_ERROR_PCT = 2.0
RESERVED_ERROR_PCT = 8.0
"""Not exceeded by any difference from published measurements, docs/measurements/plan.md."""


def of_log(device: Described, capacity: int, full: Trace) -> tuple[Verdict, dict[str, Any]]:
    """Of what tensors hold; `capacity`: bytes that the device has for them."""
    return _verdict_on_active(device, capacity, step_peak(full), start_peak(full), most_added(full))


def of_shallow_logs(
    device: Described, capacity: int, depths: Depths, shallow: Trace, deeper: Trace
) -> tuple[Verdict, dict[str, Any]]:
    """The same at full depth, from two models that are less deep."""
    deep = extrapolate(depths, shallow, deeper)
    return _verdict_on_active(device, capacity, deep.peak, deep.start, most_added(deeper))


def _verdict_on_active(
    device: Described, capacity: int, peak: PeakMemory, startup: int, block: int | None
) -> tuple[Verdict, dict[str, Any]]:
    needed = max(peak.total, startup)
    # Of the start only the sum is known at full depth.
    what, by_category = ("active", peak.by_category) if peak.total >= startup else ("active at start-up", {})
    verdict = Verdict(
        answer(needed, capacity, ACTIVE_ERROR_PCT / 100, lambda nbytes: needed <= nbytes),
        reason(what, needed, capacity, device.name, by_category),
    )
    return verdict, _memory(device, peak, None, None, startup, block, ACTIVE_ERROR_PCT)


def of_replay(
    run: Rehearsed,
    device: Described,
    capacity: int,
    settings: AllocatorSettings,
    changes: list[Change] | None,
    full: Trace,
) -> tuple[Verdict, dict[str, Any], Timed | None]:
    """
    Through the model of the allocator; the time, too, which the replay finds on its way.

    Args:
        device: without `hardware` where a rate of it that the run needs is not known.
        settings: the allocator's.
        changes: as of `replay`, where nothing limits the memory.
    """

    def replay_in(nbytes: int | None, changes: list[Change] | None = None) -> tuple[Replayed, Timed | None]:
        if device.hardware is None:
            return replay(full.events, _NoClock(), CachingAllocator(nbytes, settings), changes), None
        clock = run.clock(device.hardware)
        replayed = replay(full.events, clock, CachingAllocator(nbytes, settings), changes)
        return replayed, None if replayed.failed is not None else clock.step_ends(run.left_out)

    replayed, timed = replay_in(None, changes)
    needed, error = replayed.peak_reserved.nbytes, RESERVED_ERROR_PCT
    capped = replayed if needed <= capacity else replay_in(capacity)[0]
    peak = PeakMemory(replayed.peak_active.nbytes, replayed.by_category, replayed.peak_active.phase)
    verdict = Verdict(
        answer(needed, capacity, error / 100, lambda nbytes: replay_in(nbytes)[0].failed is None),
        reason("reserved", needed, capacity, device.name, peak.by_category, None if capped.failed else capped.retries),
    )
    memory = _memory(device, peak, replayed, capped.retries, replayed.startup_active, most_added(full), error)
    return verdict, memory, timed


def allocator_settings(experiment: Experiment) -> tuple[AllocatorSettings, list[str]]:
    """
    Those that workers on GPUs have, and a sentence for each that is not modelled.

    Raises:
        ConfigError: torch would refuse them.
    """
    name, text = that_counts(in_effect(experiment.launch.env))
    try:
        settings = AllocatorSettings.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    return settings, [f"{name}: {each} is not modelled" for each in settings.ignored]


class _NoClock:
    """For a device whose speed is not known: all that is freed is free at once."""

    host = 0.0

    def passed(self, stream: int) -> float:
        return 0.0

    def take(self, entry: Any) -> None:
        """Nothing takes time."""


def _memory(
    device: Described,
    peak: PeakMemory,
    replayed: Replayed | None,
    retries: int | None,
    startup: int,
    block: int | None,
    error: float,
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
        None if block is None else block / GIB,
        error,
    )
    return dict(zip(MEMORY, values, strict=True))

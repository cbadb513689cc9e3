"""The prediction of a run: whether it fits, what it holds when it holds most, how fast it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.fsdp2 import NCCL_BUFFERS
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.config.devices import Described
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.own_code import fault
from meshrunner.runner.plan.alloc_conf import Settings
from meshrunner.runner.plan.allocator import Allocator
from meshrunner.runner.plan.clock import Timed
from meshrunner.runner.plan.depth import Depths, extrapolate, rehearse_shallow, shallow_depths, start_peak, step_peak
from meshrunner.runner.plan.faults import needs_memory, why
from meshrunner.runner.plan.kept import most_added
from meshrunner.runner.plan.rehearse import Rehearsal, rehearse
from meshrunner.runner.plan.replay import Change, Replayed, replay
from meshrunner.runner.plan.speed import SPEED, Rehearsed, figures
from meshrunner.runner.plan.timeline import Timeline, changes_of, timeline
from meshrunner.runner.plan.verdict import GIB, NOT_PLANNED, Verdict, answer, reason
from meshrunner.runner.profiler.account import Peak

ACTIVE_ERROR_PCT = 2.0
RESERVED_ERROR_PCT = 8.0
"""Not exceeded by any difference from published measurements, docs/measurements/plan.md."""
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
    "memory/block_gib",
    "memory/error_pct",
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
        Exception: what a class of the user's raised (see `own_code.fault`).
    """
    experiment = experiment.on(device.type)
    if lacking := not_planned(experiment):
        return _unplanned(lacking)
    try:
        depths, rehearsals = _rehearsals(experiment, device, shallow=active_only and not over_time, operators=over_time)
    except ConfigError:
        raise
    except Exception as error:  # a class of the user's may raise anything, and an operator have no kernel for meta
        if not needs_memory(error) and fault(error):
            raise
        return _unplanned(f"it cannot be rehearsed: {why(error)}")
    run = _rehearsed(experiment, device, depths, rehearsals)
    hardware = device.hardware
    capacity = round((device.memory_gib - (hardware.reserved_elsewhere_gib if isinstance(hardware, GPU) else 0)) * GIB)
    changes: list[Change] | None = [] if over_time else None
    timed = None
    if depths is not None:
        verdict, memory = _from_shallow(device, capacity, depths, *rehearsals)
    elif device.type == "cuda" and not active_only:
        verdict, memory, timed = _replayed(run, device, capacity, changes, *rehearsals)
    else:
        verdict, memory = _active(device, capacity, *rehearsals)
    if timed is None and hardware is not None:
        timed = run.timed(hardware)
    drawn = None
    if changes is not None:
        (full,) = rehearsals
        drawn = timeline(changes or changes_of(full.log), full.last_step, capacity, round(device.memory_gib * GIB))
    return Prediction(verdict, memory | figures(run, hardware, timed), drawn)


def _unplanned(why: str) -> Prediction:
    return Prediction(Verdict(NOT_PLANNED, why), dict.fromkeys((*MEMORY, *SPEED)))


def speed_of(experiment: Experiment, device: Described) -> Rehearsed:
    """What the speed of a run that can be planned follows from (see `not_planned`), whatever constants the device has."""
    experiment = experiment.on(device.type)
    return _rehearsed(experiment, device, *_rehearsals(experiment, device, shallow=True, operators=True))


def _rehearsals(
    experiment: Experiment, device: Described, *, shallow: bool, operators: bool
) -> tuple[Depths | None, tuple[Rehearsal, ...]]:
    """
    One of the whole run; or, if that is enough, two of shallow ones.

    Args:
        operators: logged in any case, not only where their speed is known.
    """

    def rehearsal(recipe: Recipe) -> Rehearsal:
        return rehearse(
            recipe,
            nodes=experiment.launch.nodes,
            workers=device.workers,
            device_type=device.type,
            operators=operators or device.hardware is not None,
        )

    if shallow:
        depths = shallow_depths(experiment, len(experiment.model.on_meta(experiment.seq_len).block_names()))
        if depths is not None:
            return depths, rehearse_shallow(depths, experiment, rehearsal)
    return None, (rehearsal(experiment),)


def _rehearsed(
    experiment: Experiment, device: Described, depths: Depths | None, rehearsals: tuple[Rehearsal, ...]
) -> Rehearsed:
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, device.workers)
    tokens = rehearsals[0].tokens // degrees.tensor
    return Rehearsed(experiment, tokens, tuple(each.log for each in rehearsals), depths)


def not_planned(experiment: Experiment) -> str | None:
    """Why a run cannot be predicted; None: it can."""
    layout = experiment.parallelism
    if getattr(layout, "cpu_offload", False):
        return (
            "cpu_offload moves parameters between host and device, and FSDP2 refuses to rehearse that without a device"
        )
    if layout.kind == "megatron_fsdp":
        return "megatron_fsdp is not torch's, and cannot be rehearsed without a GPU"
    if (buffers := getattr(layout, "buffers", "")) in NCCL_BUFFERS:
        return (
            f"parallelism.buffers={buffers} takes memory from pools of NCCL's, which cannot be rehearsed without a GPU"
        )
    return None


def _active(device: Described, capacity: int, full: Rehearsal) -> tuple[Verdict, dict[str, Any]]:
    return _of_active(device, capacity, step_peak(full), start_peak(full), most_added(full))


def _from_shallow(
    device: Described, capacity: int, depths: Depths, shallow: Rehearsal, deeper: Rehearsal
) -> tuple[Verdict, dict[str, Any]]:
    deep = extrapolate(depths, shallow, deeper)
    return _of_active(device, capacity, deep.peak, deep.start, most_added(deeper))


def _of_active(
    device: Described, capacity: int, peak: Peak, startup: int, block: int | None
) -> tuple[Verdict, dict[str, Any]]:
    needed = peak.total
    verdict = Verdict(
        answer(needed, capacity, ACTIVE_ERROR_PCT / 100, lambda nbytes: needed <= nbytes),
        reason("active", needed, capacity, device.name, peak.by_category),
    )
    return verdict, _memory(device, peak, None, None, startup, block, ACTIVE_ERROR_PCT)


def _replayed(
    run: Rehearsed, device: Described, capacity: int, changes: list[Change] | None, full: Rehearsal
) -> tuple[Verdict, dict[str, Any], Timed | None]:
    """
    Through the model of the allocator; the time, too, which the replay finds on its way.

    Args:
        changes: as of `replay`, where nothing limits the memory.
    """
    settings = _settings(run.experiment)

    def replay_in(nbytes: int | None, changes: list[Change] | None = None) -> tuple[Replayed, Timed | None]:
        if device.hardware is None:
            return replay(full.log, _NoClock(), Allocator(nbytes, settings), changes), None
        clock = run.clock(device.hardware)
        return replay(full.log, clock, Allocator(nbytes, settings), changes), clock.step_ends()

    replayed, timed = replay_in(None, changes)
    needed, error = replayed.peak_reserved.nbytes, RESERVED_ERROR_PCT
    capped = replayed if needed <= capacity else replay_in(capacity)[0]
    peak = Peak(replayed.peak_active.nbytes, replayed.by_category, replayed.peak_active.phase)
    verdict = Verdict(
        answer(needed, capacity, error / 100, lambda nbytes: replay_in(nbytes)[0].failed is None),
        reason("reserved", needed, capacity, device.name, peak.by_category),
    )
    memory = _memory(device, peak, replayed, capped.retries, replayed.startup_active, most_added(full), error)
    return verdict, memory, timed


def _settings(experiment: Experiment) -> Settings:
    """The allocator's."""
    env = experiment.launch.env
    try:
        return Settings.parse(next((env[name] for name in ALLOCATOR_SETTINGS if name in env), ""))
    except ValueError as error:
        raise ConfigError(f"launch.env: the allocator's settings: {error}") from error


class _NoClock:
    """For a device whose speed is not known: all that is freed is free at once."""

    host = 0.0

    def passed(self, stream: int) -> float:
        return 0.0

    def take(self, entry: Any) -> None:
        """Nothing takes time."""


def _memory(
    device: Described,
    peak: Peak,
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

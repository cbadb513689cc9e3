"""The prediction of a run: whether it fits, what it holds when it holds most, how fast it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.config.devices import Described
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.own_code import fault
from meshrunner.runner.predict.allocator.alloc_conf import AllocatorSettings
from meshrunner.runner.predict.memory import allocator_settings, of_log, of_replay, of_shallow_logs
from meshrunner.runner.predict.replay.peaks import Change
from meshrunner.runner.predict.replay.timeline import Timeline, changes_of, timeline
from meshrunner.runner.predict.speed import Rehearsed, figures
from meshrunner.runner.predict.trace.depth import Depths, shallow_depths, trace_shallow
from meshrunner.runner.predict.trace.faults import needs_memory, why
from meshrunner.runner.predict.trace.tracer import Trace, trace_recipe
from meshrunner.runner.predict.verdict import GIB, NOT_PLANNED, Verdict, as_json


class Prediction(NamedTuple):
    """The answer, and its figures by their keys in JSON: of MEMORY and SPEED."""

    verdict: Verdict
    figures: dict[str, Any] | None
    """None: none is known."""
    remarks: tuple[str, ...] = ()
    """What was left out of account, and why a figure is not known."""
    over_time: Timeline | None = None
    """Memory over the last step, where it was asked for."""

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return as_json(self.verdict, self.figures, self.remarks)


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
    settings, remarks = allocator_settings(experiment) if device.type == "cuda" else (AllocatorSettings(), [])
    try:
        depths, rehearsals = _rehearsals(experiment, device, shallow=active_only and not over_time, operators=over_time)
    except ConfigError:
        raise
    except Exception as error:  # a class of the user's may raise anything, and an operator have no kernel for meta
        if not needs_memory(error) and fault(error):
            raise
        return _unplanned(f"it cannot be rehearsed: {why(error)}")
    run = _rehearsed(experiment, device, depths, rehearsals)
    elsewhere = device.hardware.reserved_elsewhere_gib if isinstance(device.hardware, GPU) else 0.0
    capacity = max(0, round((device.memory_gib - elsewhere) * GIB))
    if device.hardware is not None and (unknown := run.unknown_rate(device.hardware)):
        remarks.append(unknown)
        device = device._replace(hardware=None)
    hardware = device.hardware
    changes: list[Change] | None = [] if over_time else None
    timed = None
    if depths is not None:
        verdict, memory = of_shallow_logs(device, capacity, depths, *rehearsals)
    elif device.type == "cuda" and not active_only:
        verdict, memory, timed = of_replay(run, device, capacity, settings, changes, *rehearsals)
    else:
        verdict, memory = of_log(device, capacity, *rehearsals)
    if timed is None and hardware is not None:
        timed = run.timed(hardware)
    drawn = None
    if changes is not None:
        (full,) = rehearsals
        drawn = timeline(changes or changes_of(full.events), full.last_step, capacity, round(device.memory_gib * GIB))
    return Prediction(verdict, memory | figures(run, hardware, timed), tuple(remarks), drawn)


def _unplanned(reason: str) -> Prediction:
    return Prediction(Verdict(NOT_PLANNED, reason), None)


def speed_of(experiment: Experiment, device: Described) -> Rehearsed:
    """What the speed of a run that can be planned follows from (see `not_planned`), whatever constants the device has."""
    experiment = experiment.on(device.type)
    return _rehearsed(experiment, device, *_rehearsals(experiment, device, shallow=True, operators=True))


def _rehearsals(
    experiment: Experiment, device: Described, *, shallow: bool, operators: bool
) -> tuple[Depths | None, tuple[Trace, ...]]:
    """
    One of the whole run; or, if that is enough, two of shallow ones.

    Args:
        operators: logged in any case, not only where their speed is known.
    """

    def rehearsal(recipe: Recipe) -> Trace:
        return trace_recipe(
            recipe,
            nodes=experiment.launch.nodes,
            workers=device.workers,
            device_type=device.type,
            operators=operators or device.hardware is not None,
        )

    if shallow:
        depths = shallow_depths(experiment, len(experiment.model.on_meta(experiment.seq_len).block_names()))
        if depths is not None:
            return depths, trace_shallow(depths, experiment, rehearsal)
    return None, (rehearsal(experiment),)


def _rehearsed(
    experiment: Experiment, device: Described, depths: Depths | None, rehearsals: tuple[Trace, ...]
) -> Rehearsed:
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, device.workers)
    tokens = rehearsals[0].tokens / degrees.tensor
    logs = tuple(each.events for each in rehearsals)
    return Rehearsed(experiment, device.workers, tokens, rehearsals[0].skipped_micro_batches, logs, depths)


def not_planned(experiment: Experiment) -> str | None:
    """Return the reason that a run cannot be predicted, None if it can."""
    return experiment.parallelism.untraceable()

"""
Predicts runs before the first of them starts (`sweep.preflight`).

A prediction that fails or takes too long stops nothing: the run starts as if it fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshrunner.runner.config.devices import expected_device_type
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.console import naming, one_line, warn
from meshrunner.runner.predict import DOES_NOT_FIT, NOT_IN_TIME, NOT_PLANNED, Predicted, predict_all
from meshrunner.runner.rundir import RESULTS, PlanRecord, read_state
from meshrunner.runner.rundir.files import PLAN

if TYPE_CHECKING:
    from meshrunner.runner.sweep.combinations import Combination, SweepBatch, Target

BUDGET_S = 60.0
"""Longest time that runs wait for their predictions."""
MAX_LISTED = 10
"""Most combinations that are warned of by name."""


def wanted(experiment: Experiment, *, here: bool) -> bool:
    """
    Return whether to predict a run: on a GPU, and with sweep.preflight=skip also on a CPU.

    Args:
        here: whether it is executed on this machine, so that `hardware=auto` can be resolved.
    """
    if experiment.sweep.preflight == "off":
        return False
    if isinstance(experiment.hardware, GPU):
        return True
    return here and (experiment.sweep.preflight == "skip" or expected_device_type(experiment.hardware) == "cuda")


def predict_single_run(config: dict[str, Any], experiment: Experiment, workers: int, *, here: bool) -> dict[str, Any]:
    """
    Return the content of plan.json for a run outside a sweep, {} for none; warn if the run does not fit.

    Args:
        here: see `wanted`.
    """
    if not wanted(experiment, here=here):
        return {}
    (plan,) = predicted_plans([config], [workers])
    if reason := does_not_fit(plan):
        warn(reason)
    return plan


def with_predictions(batch: SweepBatch, target: Target) -> SweepBatch:
    """Return a batch with its predictions; warn of combinations that do not fit, or mark them to be skipped (`skip`)."""
    from meshrunner.runner.slurm.settings import Slurm

    here = not isinstance(target, Slurm)
    jobs = [
        job
        for job in batch.combinations
        if not job.runs[0].reason and wanted(job.experiment, here=here) and not _has_results(job)
    ]
    plans = {id(job): _recorded(job) for job in jobs}  # of a sweep that is started again
    new = [job for job in jobs if not plans[id(job)]]
    found = predicted_plans(
        [job.runs[0].composed.config for job in new], [target.workers(job.experiment) for job in new]
    )
    plans |= {id(job): plan for job, plan in zip(new, found, strict=True)}
    _warn([job for job in jobs if does_not_fit(plans[id(job)])], plans)
    combinations = [_planned(job, plans.get(id(job), {})) for job in batch.combinations]
    return replace(batch, combinations=combinations)


def predicted_plans(configs: Sequence[dict[str, Any]], workers: Sequence[int]) -> list[dict[str, Any]]:
    """
    Return the content of plan.json for each run, {} and a warning where there is no prediction.

    Args:
        configs: as in config.yaml.
        workers: per node, of each run.
    """
    if not configs:
        return []
    resolved = [
        config | {"launch": config["launch"] | {"workers": count}}
        for config, count in zip(configs, workers, strict=True)
    ]
    many = f"{len(configs):,} combinations" if len(configs) > 1 else "memory and speed"
    try:
        with naming(f"predicting {many}"):
            found = predict_all(resolved, active_only=True, within_s=BUDGET_S)
    except Exception as error:  # the forkserver was killed, the disk is full
        found = [Predicted(None, f"{type(error).__name__}: {error}")] * len(configs)
    late = sum(each is NOT_IN_TIME for each in found)
    if late:
        warn(f"preflight: {late:,} of {len(found):,} were not predicted within {BUDGET_S:g} s; starting them anyway")
    faults = [fault for each in found if each is not NOT_IN_TIME and (fault := _fault(each))]
    if faults:
        warn(
            f"preflight: {len(faults):,} of {len(found):,} could not be predicted; starting them anyway: "
            f"{one_line(faults[0])}"
        )
    return [each.forecast.as_json() if each.forecast is not None else {} for each in found]


def does_not_fit(plan: dict[str, Any]) -> str:
    """Return why a predicted run certainly does not fit; empty if it may fit."""
    return f"predicted not to fit: {plan.get('reason')}" if plan.get("verdict") == DOES_NOT_FIT else ""


def _fault(predicted: Predicted) -> str:
    """Return why there is no prediction; empty if there is one."""
    forecast = predicted.forecast
    unplanned = forecast is not None and forecast.verdict.answer == NOT_PLANNED
    return forecast.verdict.reason if forecast is not None and unplanned else predicted.fault


def _has_results(job: Combination) -> bool:
    return all(read_state(run.run_dir) in RESULTS - {"skipped"} for run in job.runs)


def _recorded(job: Combination) -> dict[str, Any]:
    """Return an earlier start's plan if the device is named; `hardware=auto` may find another device this time."""
    if not isinstance(job.experiment.hardware, GPU):
        return {}
    return PlanRecord.peek(job.runs[0].run_dir / PLAN).as_json()


def _planned(job: Combination, plan: dict[str, Any]) -> Combination:
    if not plan:
        return job
    reason = does_not_fit(plan) if job.experiment.sweep.preflight == "skip" else ""
    return replace(job, runs=[replace(run, plan=plan, reason=run.reason or reason) for run in job.runs])


def _warn(jobs: list[Combination], plans: dict[int, dict[str, Any]]) -> None:
    """Warn of combinations that do not fit."""
    for job in jobs[:MAX_LISTED]:
        warn(f"{job.runs[0].run_dir.name}: {does_not_fit(plans[id(job)])}")
    if len(jobs) > MAX_LISTED:
        warn(f"{len(jobs) - MAX_LISTED:,} more combinations are predicted not to fit")
    skipped = sum(job.experiment.sweep.preflight == "skip" for job in jobs)
    if skipped:
        warn(f"{'they' if skipped == len(jobs) else f'{skipped:,} of them'} are left out (sweep.preflight=skip)")
    if skipped < len(jobs):
        warn("starting them anyway; sweep.preflight=skip leaves them out")

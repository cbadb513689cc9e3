"""`sweep.preflight`: every combination of a sweep is predicted before the first run begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.console import warn
from meshrunner.runner.predict.preflight import foretold, misfit, wanted
from meshrunner.runner.rundir.files import PLAN
from meshrunner.runner.rundir.records import Prediction
from meshrunner.runner.rundir.states import RESULTS, read_state
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.sweep.combinations import Combination, SweepBatch, Target

MAX_LISTED = 10
"""Combinations that are warned of."""


def with_predictions(batch: SweepBatch, target: Target) -> SweepBatch:
    """
    A batch with its predictions; combinations that certainly do not fit are warned of, or, with `skip`, to be skipped.

    A combination that could not be predicted begins as if it fitted.
    """
    here = not isinstance(target, Slurm)
    jobs = [
        job
        for job in batch.combinations
        if not job.runs[0].reason and wanted(job.experiment, here=here) and not _has_results(job)
    ]
    plans = {id(job): _recorded(job) for job in jobs}  # of a sweep that is started again
    new = [job for job in jobs if not plans[id(job)]]
    found = foretold([job.runs[0].composed.config for job in new], [target.workers(job.experiment) for job in new])
    plans |= {id(job): plan for job, plan in zip(new, found, strict=True)}
    _warn([job for job in jobs if misfit(plans[id(job)])], plans)
    combinations = [_planned(job, plans.get(id(job), {})) for job in batch.combinations]
    return replace(batch, combinations=combinations)


def _has_results(job: Combination) -> bool:
    return all(read_state(run.run_dir) in RESULTS - {"skipped"} for run in job.runs)


def _recorded(job: Combination) -> dict[str, Any]:
    """Where the device is named: what is found on this machine need not be what an earlier start found."""
    if not isinstance(job.experiment.hardware, GPU):
        return {}
    try:
        return Prediction.read(job.runs[0].run_dir / PLAN).as_json()
    except OSError:
        return {}


def _planned(job: Combination, plan: dict[str, Any]) -> Combination:
    if not plan:
        return job
    why = misfit(plan) if job.experiment.sweep.preflight == "skip" else ""
    return replace(job, runs=[replace(run, plan=plan, reason=run.reason or why) for run in job.runs])


def _warn(misfits: list[Combination], plans: dict[int, dict[str, Any]]) -> None:
    for job in misfits[:MAX_LISTED]:
        warn(f"{job.runs[0].run_dir.name}: {misfit(plans[id(job)])}")
    if len(misfits) > MAX_LISTED:
        warn(f"{len(misfits) - MAX_LISTED:,} more combinations are predicted not to fit")
    left_out = sum(job.experiment.sweep.preflight == "skip" for job in misfits)
    if left_out:
        warn(f"{'they' if left_out == len(misfits) else f'{left_out:,} of them'} are left out (sweep.preflight=skip)")
    if left_out < len(misfits):
        warn("they begin all the same; sweep.preflight=skip leaves them out")

"""Predicts the memory and speed of runs before they start (`sweep.preflight`). A run without a prediction starts anyway."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrunner.recipes.config_keys import with_value
from meshrunner.runner.config.devices import expected_device_type
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.config.interpreter import is_other
from meshrunner.runner.console import counted, naming, one_line, warn
from meshrunner.runner.predict import DOES_NOT_FIT, NOT_IN_TIME, NOT_PLANNED, not_planned, predict_all
from meshrunner.runner.rundir import RESULTS, PlanRecord, read_state
from meshrunner.runner.rundir.files import PLAN
from meshrunner.runner.sweep.combinations import Combination, SweepBatch, Target

Progress = Callable[[int, int], object]
BUDGET_S = 60.0
"""Maximum seconds that a sweep waits for predictions."""
MAX_LISTED = 10
"""Maximum number of combinations for which to print a separate warning."""


def wanted(experiment: Experiment, *, here: bool) -> bool:
    """Return whether to predict a run. If `hardware` is not a GPU, predict only runs on this machine (`here`). If training
    uses CPUs, predict only if a rank is emulated or sweep.preflight is skip."""
    if experiment.sweep.preflight == "off" or is_other(experiment.launch.python):
        return False
    if isinstance(experiment.hardware, GPU):
        return True
    wanted_on_cpu = experiment.sweep.preflight == "skip" or experiment.launch.emulate is not None
    return here and (wanted_on_cpu or expected_device_type(experiment.hardware) == "cuda")


def predict_single_run(config: dict[str, Any], experiment: Experiment, workers: int, *, here: bool) -> dict[str, Any]:
    """Predict a run that is not part of a sweep, and warn if the run does not fit. Return the content of plan.json, or {}."""
    if not wanted(experiment, here=here):
        return {}
    (plan,) = predicted_plans([config], [workers])
    if reason := does_not_fit(plan):
        warn(reason)
    return plan


def save_prediction(run_dir: Path, config: dict[str, Any], experiment: Experiment, workers: int) -> None:
    """Predict a run that starts on this machine, and write plan.json to its directory. Safe to call from any thread."""
    if plan := predict_single_run(config, experiment, workers, here=True):
        with suppress(OSError):  # a full disk must not stop the run
            PlanRecord.model_validate(plan).write(run_dir / PLAN)


def with_predictions(batch: SweepBatch, target: Target) -> SweepBatch:
    """Return the batch with predictions. Warn of combinations that do not fit. Mark them as skipped if sweep.preflight=skip."""
    jobs = [
        job
        for job in batch.combinations
        if not job.reason
        and wanted(job.experiment, here=target.here)
        and not all(read_state(run.run_dir) in RESULTS - {"skipped"} for run in job.runs)
    ]
    configs, workers = [job.runs[0].config for job in jobs], [target.workers(job.experiment) for job in jobs]
    with naming(f"predicting {counted(len(jobs), 'combination')}") as progress:
        found = predicted_plans(configs, workers, progress)
    planned = {}
    for job, plan in zip(jobs, found, strict=True):
        reason = does_not_fit(plan) if job.experiment.sweep.preflight == "skip" else ""
        planned[id(job)] = replace(job, plan=plan, reason=reason)
    _warn([job for job in planned.values() if does_not_fit(job.plan)])
    return replace(batch, combinations=[planned.get(id(job), job) for job in batch.combinations])


def predicted_plans(
    configs: Sequence[dict[str, Any]], workers: Sequence[int], progress: Progress = lambda done, total: None
) -> list[dict[str, Any]]:
    """Return the content of plan.json for each run, or {} for runs without a prediction after BUDGET_S seconds. Warn of failures.
    `workers`: number of workers per node, for each run."""
    if not configs:
        return []
    resolved = [with_value(config, "launch.workers", count) for config, count in zip(configs, workers, strict=True)]
    try:
        found = predict_all(resolved, active_only=True, within_s=BUDGET_S, progress=progress)
    except Exception as error:  # for example, the forkserver was killed or the disk is full
        found = [not_planned(f"{type(error).__name__}: {error}")] * len(configs)
    faults = [each.verdict.reason for each in found if each.verdict.answer == NOT_PLANNED and each != NOT_IN_TIME]
    of_all = f"of {len(found):,} combinations"
    if late := found.count(NOT_IN_TIME):
        warn(f"preflight: {late:,} {of_all} have no prediction after {BUDGET_S:g} s; starting them anyway")
    if faults:
        many = f"{len(faults):,} {of_all} could not be predicted"
        warn(f"preflight: {many}; starting them anyway. First error: {one_line(faults[0])}")
    return [{} if each == NOT_IN_TIME else each.as_json() for each in found]


def does_not_fit(plan: dict[str, Any]) -> str:
    """Return the reason why a run is predicted not to fit in memory, or "" if the run may fit."""
    return f"predicted not to fit: {plan.get('reason')}" if plan.get("verdict") == DOES_NOT_FIT else ""


def _warn(jobs: list[Combination]) -> None:
    for job in jobs[:MAX_LISTED]:
        warn(f"{job.runs[0].run_dir.name}: {does_not_fit(job.plan)}")
    if len(jobs) > MAX_LISTED:
        warn(f"{len(jobs) - MAX_LISTED:,} more combinations are predicted not to fit")
    if jobs:
        skipped = "skipping these combinations (sweep.preflight=skip)"
        warn(skipped if jobs[0].reason else "starting these combinations; sweep.preflight=skip would skip them")

"""Submits unfinished runs to SLURM, except runs that a process is executing or that have a queued or running job."""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import replace_file
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.console import counted, say, shown, warn
from meshrunner.runner.process.signals import interruptible
from meshrunner.runner.rundir import (
    RESULTS,
    PlanRecord,
    Submission,
    condition,
    owner_is_alive,
    read_status,
    update_status,
)
from meshrunner.runner.rundir.files import LOGS, PLAN, SLURM_JOB, SLURM_SETTINGS, slurm_script, write_json
from meshrunner.runner.slurm.client import job_id, jobs, longest_minutes, slurm
from meshrunner.runner.slurm.script import sbatch_script
from meshrunner.runner.slurm.settings import Nodes, Slurm

POLL_S = 2.0
STEP = "perf/step_time_s"
SLACK = 2.0
"""Factor by which a time limit exceeds the predicted time of the steps, to allow for checkpoints and slower nodes."""


def submit_runs(
    folder: Path,
    experiments: Mapping[Path, Experiment],
    settings: Slurm,
    names: Sequence[str] = (),
    plans: Mapping[Path, dict[str, Any]] = MappingProxyType({}),
) -> None:
    """Submit runs, or only print their scripts if `settings.dry_run` is set. Raise ConfigError if SLURM rejects a script. The
    runs of a sweep that request the same numbers of nodes and GPUs form one job array. `names`: all runs of the sweep, as in
    runs.txt; () for a single run. Task N executes names[N]. `plans`: predictions for runs whose directory lacks plan.json."""
    arrays: dict[Nodes, dict[int | None, Path]] = {}
    for run_dir, experiment in experiments.items():
        settings.fit(experiment)
        task = names.index(run_dir.name) if names else None
        arrays.setdefault(settings.request(experiment), {})[task] = run_dir
    scripts = []
    for nodes, runs in arrays.items():
        planned = (
            (experiments[each], plans.get(each) or PlanRecord.peek(each / PLAN).as_json()) for each in runs.values()
        )
        time_limit = settings.time or predicted_limit(planned, settings.partition)
        timed = settings.model_copy(update={"time": time_limit})
        scripts.append(sbatch_script(folder, timed, nodes, [task for task in runs if task is not None]))
    if settings.dry_run:
        say("".join(scripts), end="")
        return
    _warn(experiments.values())
    for run_dir in experiments:
        update_status(run_dir, state="pending", reason="")  # before submission: a submitted job may start at any time
    for number, ((nodes, runs), script) in enumerate(zip(arrays.items(), scripts, strict=True)):
        path = slurm_script(folder, number if len(arrays) > 1 else None)
        job_number = _sbatch(path, script, folder, settings)
        for task, run_dir in runs.items():
            own_id = job_number if task is None else f"{job_number}_{task}"
            Submission(job_id=own_id, submitted=time.time(), script=str(path)).write(run_dir / SLURM_JOB)
        if names:
            say(f"submitted job array {job_number}: {counted(len(runs), 'run')}, {counted(nodes.number, 'node')} each")
        else:
            say(f"submitted job {job_number}")
    kind, place = "sweep" if names else "run", shown(folder)
    say(f"{kind} directory: {place}")
    if names:
        say(f"`meshrunner status {place}` shows the progress of the runs, `meshrunner compare {place}` compares them")


def predicted_limit(runs: Iterable[tuple[Experiment, Mapping[str, Any]]], partition: str | None) -> str | None:
    """Return a time limit for the longest run: launch.start_timeout_minutes + SLACK x predicted time of all steps. Return None
    if a run has no predicted speed or the partition allows less time. `runs`: (configuration, content of plan.json) per run."""
    minutes = 0
    for experiment, plan in runs:
        if (step_s := plan.get(STEP)) is None:
            return None
        training_s = SLACK * step_s * experiment.steps
        minutes = max(minutes, math.ceil(experiment.launch.start_timeout_minutes + training_s / 60))
    return f"{minutes // 60}:{minutes % 60:02}:00" if 0 < minutes <= longest_minutes(partition) else None


def submit_search(folder: Path, experiment: Experiment, settings: Slurm) -> None:
    """Submit a `meshrunner tune` search as one job. If `settings.dry_run` is set, only print the job's script."""
    script = sbatch_script(folder, settings, settings.request(experiment))
    if settings.dry_run:
        say(script, end="")
        return
    (folder / LOGS).mkdir(exist_ok=True)
    say(f"submitted job {_sbatch(slurm_script(folder), script, folder, settings)}\nsweep directory: {shown(folder)}")


def wait(run_dirs: Sequence[Path]) -> int:
    """Wait until the jobs of all runs have ended. Return 0 if all runs have a result, else 75 if a run was preempted, else 1."""
    ids = [found for run_dir in run_dirs if (found := job_id(run_dir))]
    with interruptible("; the jobs stay in SLURM's queue"):
        while True:
            try:
                if not any(job.active for job in jobs(ids).values()):
                    break
            except ConfigError as error:  # the controller may be restarting
                warn(str(error))
            time.sleep(POLL_S)
    states = [read_status(run_dir).state for run_dir in run_dirs]
    return 0 if all(state in RESULTS for state in states) else 75 if "preempted" in states else 1


def to_submit(run_dirs: Sequence[Path], rerun: Sequence[str], *, quiet: bool) -> list[Path]:
    """Return the runs to submit. Unless `quiet`, print why the others are skipped. `rerun`: states of runs to submit again."""
    known = jobs(found for run_dir in run_dirs if (found := job_id(run_dir)))
    todo: list[Path] = []
    tell: Callable[[str], object] = (lambda _: None) if quiet else say
    for run_dir in run_dirs:
        status, number = read_status(run_dir), job_id(run_dir)
        state, job = status.state, known.get(number or "")
        finished = state in RESULTS and state not in rerun
        if job is not None and job.active and not finished:
            tell(f"{run_dir.name} already has job {number}: {job}")
        elif finished or owner_is_alive(status):
            tell(f"{run_dir.name} {condition(status)}")
        else:
            todo.append(run_dir)
    return todo


def _warn(experiments: Iterable[Experiment]) -> None:
    """Warn if runs save no checkpoints, or if their data file does not exist on this machine."""
    if any(experiment.checkpoint.kind == "none" for experiment in experiments):
        warn(
            "checkpoint=none: a run that is preempted or loses a node starts again at step 1. Use checkpoint=dcp to continue runs"
        )
    for path in {experiment.data.local_path for experiment in experiments}:
        if path is not None and not set(path) & set("*?[") and not Path(path).expanduser().exists():
            warn(f"data.path: no such file on this machine: {path}. The file must exist on the nodes")


def _sbatch(path: Path, text: str, folder: Path, settings: Slurm) -> str:
    """Write a script and its settings, submit it and return the job's number. If SLURM rejects the script, raise ConfigError."""
    write_json(folder / SLURM_SETTINGS, settings.model_dump())
    replace_file(path, os.fsencode(text))
    try:
        return slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except ConfigError as error:
        raise ConfigError(
            f"SLURM rejected {shown(path)}: {error}\n"
            f"No job was created. To submit the runs again: meshrunner submit {shown(folder)} hydra.launcher.KEY=VALUE"
        ) from None

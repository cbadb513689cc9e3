"""Submitting run directories as SLURM jobs: the unfinished ones that no job and no process is at work on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage.durable import replace_file
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.placed import Usable, usable_runs
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.process.signals import interruptible
from meshrunner.runner.rundir import (
    RESULTS,
    Submission,
    condition,
    find_obstacle,
    owner_is_alive,
    read_config,
    read_state,
    read_status,
    update_status,
)
from meshrunner.runner.rundir.files import SLURM_JOB, SLURM_SETTINGS, slurm_script, write_json
from meshrunner.runner.slurm import script
from meshrunner.runner.slurm.client import jobs, slurm
from meshrunner.runner.slurm.settings import Nodes, Slurm

POLL_S = 2.0


@dataclass(frozen=True)
class JobArray:
    """Runs of a sweep that ask for the same nodes, which the tasks of an array have to."""

    nodes: Nodes
    tasks: dict[int, Path] = field(default_factory=dict)
    """Line of runs.txt, counted from 0 -> run directory."""


def job_id(run_dir: Path) -> str | None:
    """Return the id of a run's newest job, `12` or `12_3`; None if the run was never submitted or the record is damaged."""
    return Submission.peek(run_dir / SLURM_JOB).job_id


def submit_run(run_dir: Path, settings: Slurm) -> None:
    """Submit a placed run; raises ConfigError with SLURM's reason."""
    if obstacle := find_obstacle(run_dir):
        raise ConfigError(f"damaged: {run_dir}: {obstacle}")
    experiment = check(read_config(run_dir))
    settings.fit(experiment)
    if not to_submit([run_dir], [], quiet=settings.dry_run):
        return
    text = script.for_run(run_dir, settings, settings.asked(experiment))
    if settings.dry_run:
        say(text, end="")
        return
    _warn([experiment])
    update_status(run_dir, state="pending", reason="")
    write_json(run_dir / SLURM_SETTINGS, settings.model_dump())
    path = slurm_script(run_dir)
    job = _sbatch(path, text, run_dir)
    _record(run_dir, job, path)
    say(f"submitted job {job}\nrun directory: {shown(run_dir)}")


def submit_sweep(sweep_dir: Path, names: Sequence[str], settings: Slurm) -> Usable:
    """
    Submit the runs of a placed sweep as job arrays, one for each number of nodes; warns of each that is damaged.

    Args:
        names: all run directories of the sweep, as in runs.txt.

    Returns:
        The runs that are not damaged.
    """
    usable = usable_runs(sweep_dir, names)
    todo = to_submit(usable.run_dirs, usable.first.sweep.rerun, quiet=settings.dry_run)
    experiments = {run_dir: check(read_config(run_dir)) for run_dir in todo}
    for run_dir in todo:
        settings.fit(experiments[run_dir])
    arrays = job_arrays(names, {run_dir: experiments[run_dir] for run_dir in todo}, settings)
    if settings.dry_run:
        print_arrays(sweep_dir, arrays, settings)
        return usable
    _warn([experiments[run_dir] for run_dir in todo])
    write_json(sweep_dir / SLURM_SETTINGS, settings.model_dump())
    for run_dir in todo:
        update_status(run_dir, state="pending", reason="")  # now: once submitted, the job may begin at any time
    for number, array in enumerate(arrays):
        path = slurm_script(sweep_dir, number if len(arrays) > 1 else None)
        job = _sbatch(path, _text(sweep_dir, array, settings), sweep_dir)
        for task, run_dir in array.tasks.items():
            _record(run_dir, f"{job}_{task}", path)
        runs, nodes = len(array.tasks), array.nodes.number
        print(f"submitted job array {job}: {runs} run{'s' * (runs > 1)} of {nodes} node{'s' * (nodes > 1)}")
    place = shown(sweep_dir)
    say(
        f"sweep directory: {place}\n`meshrunner status {place}` says how far they are, `meshrunner compare {place}` compares"
    )
    return usable


def job_arrays(names: Sequence[str], runs: Mapping[Path, Experiment], settings: Slurm) -> list[JobArray]:
    """
    The arrays that runs of a sweep are submitted as.

    Args:
        names: all run directories of the sweep, as in runs.txt.
    """
    found: dict[Nodes, JobArray] = {}
    for run_dir, experiment in runs.items():
        nodes = settings.asked(experiment)
        found.setdefault(nodes, JobArray(nodes)).tasks[names.index(run_dir.name)] = run_dir
    return list(found.values())


def print_arrays(sweep_dir: Path, arrays: Sequence[JobArray], settings: Slurm) -> None:
    """Print the scripts that would be submitted, and nothing else."""
    for array in arrays:
        say(_text(sweep_dir, array, settings), end="")


def _text(sweep_dir: Path, array: JobArray, settings: Slurm) -> str:
    return script.for_sweep(sweep_dir, list(array.tasks), settings, array.nodes)


def wait(run_dirs: Sequence[Path]) -> int:
    """Return when no job of these runs is active any more; the exit status is that of a local sweep."""
    ids = [found for run_dir in run_dirs if (found := job_id(run_dir))]
    with interruptible("; the jobs stay in SLURM's queue"):
        while _any_active(ids):
            time.sleep(POLL_S)
    states = [read_state(run_dir) for run_dir in run_dirs]
    return 0 if all(state in RESULTS for state in states) else 75 if "preempted" in states else 1


def _any_active(ids: Sequence[str]) -> bool:
    try:
        return any(job.active for job in jobs(ids).values())
    except ConfigError as error:  # a controller that is restarted says nothing of the jobs
        warn(str(error))
        return True


def to_submit(run_dirs: Sequence[Path], rerun: Sequence[str], *, quiet: bool) -> list[Path]:
    """
    The unfinished runs that no job and no process is at work on. Unless `quiet`, what the others are at is printed.

    Args:
        rerun: states of finished runs that are executed again, too.
    """
    known = jobs(found for run_dir in run_dirs if (found := job_id(run_dir)))
    todo: list[Path] = []
    tell: Callable[[str], object] = (lambda _: None) if quiet else say
    for run_dir in run_dirs:
        status, number = read_status(run_dir), job_id(run_dir)
        state, job = status.state, known.get(number or "")
        finished = state in RESULTS and state not in rerun
        if job is not None and job.active and not finished:
            tell(f"{run_dir.name} has job {number}: {job}")
        elif finished or owner_is_alive(status):
            tell(f"{run_dir.name} {condition(status)}")
        else:
            todo.append(run_dir)
    return todo


def _warn(experiments: Sequence[Experiment]) -> None:
    """Warn of what can be submitted and disappoints later."""
    if any(experiment.checkpoint.kind == "none" for experiment in experiments):
        warn(
            "checkpoint=none: a run that is preempted or loses a node begins again at step 1; checkpoint=dcp continues it"
        )
    for path in {_missing(experiment) for experiment in experiments} - {None}:
        warn(f"data.path: {path} is not on this machine; it must be on the nodes")


def _missing(experiment: Experiment) -> str | None:
    """The path of the data if this machine has no such file; None otherwise."""
    path = experiment.data.local_path
    if path is None or any(sign in path for sign in "*?["):
        return None
    return None if Path(path).expanduser().exists() else path


def _sbatch(path: Path, text: str, folder: Path) -> str:
    """Write a script and submit it; returns the job's number, raises ConfigError that says how to submit `folder` again."""
    replace_file(path, os.fsencode(text))
    try:
        return slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except ConfigError as error:
        raise ConfigError(
            f"SLURM refuses {shown(path)}: {error}\n"
            f"The runs are pending: `meshrunner submit {shown(folder)} hydra.launcher.KEY=VALUE` submits them with other settings"
        ) from None


def _record(run_dir: Path, job: str, path: Path) -> None:
    Submission(job_id=job, submitted=time.time(), script=str(path)).write(run_dir / SLURM_JOB)

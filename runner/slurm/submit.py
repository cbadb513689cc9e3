"""Submits run directories to SLURM: the unfinished ones that no job and no process is executing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from meshrunner.runner.slurm.client import jobs, slurm
from meshrunner.runner.slurm.script import sbatch_script
from meshrunner.runner.slurm.settings import Nodes, Slurm

POLL_S = 2.0


@dataclass(frozen=True)
class Job:
    """A job to submit: one run, or an array of runs of a sweep. The tasks of an array request the same nodes."""

    folder: Path
    """The run directory, or the sweep directory of an array."""
    nodes: Nodes
    runs: dict[int | None, Path]
    """Array task, a line of runs.txt counted from 0, -> run directory; the key of a single run is None."""

    def script(self, settings: Slurm) -> str:
        """Return the sbatch script."""
        tasks = [task for task in self.runs if task is not None]
        return sbatch_script(self.folder, settings, self.nodes, tasks or None)


def job_id(run_dir: Path) -> str | None:
    """Return the id of a run's newest job, `12` or `12_3`; None if the run was never submitted or the record is damaged."""
    return Submission.peek(run_dir / SLURM_JOB).job_id


def submit_run(run_dir: Path, settings: Slurm) -> None:
    """Submit a placed run; raise ConfigError with SLURM's reason."""
    if obstacle := find_obstacle(run_dir):
        raise ConfigError(f"damaged: {run_dir}: {obstacle}")
    experiment = check(read_config(run_dir))
    settings.fit(experiment)
    if to_submit([run_dir], [], quiet=settings.dry_run):
        _submit([Job(run_dir, settings.request(experiment), {None: run_dir})], {run_dir: experiment}, settings)
        if not settings.dry_run:
            say(f"run directory: {shown(run_dir)}")


def submit_sweep(sweep_dir: Path, names: Sequence[str], settings: Slurm) -> Usable:
    """
    Submit the runs of a placed sweep as job arrays, one for each request of nodes. Warn of damaged runs.

    Args:
        names: all run directories of the sweep, as in runs.txt.

    Returns:
        The runs that are not damaged.
    """
    usable = usable_runs(sweep_dir, names)
    todo = to_submit(usable.run_dirs, usable.first.sweep.rerun, quiet=settings.dry_run)
    experiments = {run_dir: check(read_config(run_dir)) for run_dir in todo}
    for experiment in experiments.values():
        settings.fit(experiment)
    _submit(job_arrays(sweep_dir, names, experiments, settings), experiments, settings)
    if not settings.dry_run:
        place = shown(sweep_dir)
        say(
            f"sweep directory: {place}\n"
            f"`meshrunner status {place}` shows the progress of the runs, `meshrunner compare {place}` compares them"
        )
    return usable


def job_arrays(sweep_dir: Path, names: Sequence[str], runs: Mapping[Path, Experiment], settings: Slurm) -> list[Job]:
    """
    Group runs of a sweep into arrays.

    Args:
        names: all run directories of the sweep, as in runs.txt.
    """
    found: dict[Nodes, Job] = {}
    for run_dir, experiment in runs.items():
        nodes = settings.request(experiment)
        found.setdefault(nodes, Job(sweep_dir, nodes, {})).runs[names.index(run_dir.name)] = run_dir
    return list(found.values())


def _submit(todo: Sequence[Job], experiments: Mapping[Path, Experiment], settings: Slurm) -> None:
    """Submit jobs of one run or sweep directory, or print their scripts with `settings.dry_run`."""
    if settings.dry_run:
        print_scripts(todo, settings)
        return
    _warn(experiments.values())
    for run_dir in experiments:
        update_status(run_dir, state="pending", reason="")  # before the job is submitted: it may start at any time
    for number, job in enumerate(todo):
        write_json(job.folder / SLURM_SETTINGS, settings.model_dump())
        path = slurm_script(job.folder, number if len(todo) > 1 else None)
        job_number = _sbatch(path, job.script(settings), job.folder)
        for task, run_dir in job.runs.items():
            own_id = job_number if task is None else f"{job_number}_{task}"
            Submission(job_id=own_id, submitted=time.time(), script=str(path)).write(run_dir / SLURM_JOB)
        if None in job.runs:
            say(f"submitted job {job_number}")
        else:
            runs, nodes = len(job.runs), job.nodes.number
            say(f"submitted job array {job_number}: {runs} run{'s' * (runs > 1)} of {nodes} node{'s' * (nodes > 1)}")


def print_scripts(todo: Sequence[Job], settings: Slurm) -> None:
    """Print the scripts of jobs without submitting them."""
    for job in todo:
        say(job.script(settings), end="")


def wait(run_dirs: Sequence[Path]) -> int:
    """Wait until no job of these runs is active; return the exit status that a local sweep would have."""
    ids = [found for run_dir in run_dirs if (found := job_id(run_dir))]
    with interruptible("; the jobs stay in SLURM's queue"):
        while _any_active(ids):
            time.sleep(POLL_S)
    states = [read_state(run_dir) for run_dir in run_dirs]
    return 0 if all(state in RESULTS for state in states) else 75 if "preempted" in states else 1


def _any_active(ids: Sequence[str]) -> bool:
    try:
        return any(job.active for job in jobs(ids).values())
    except ConfigError as error:  # the controller may be restarting
        warn(str(error))
        return True


def to_submit(run_dirs: Sequence[Path], rerun: Sequence[str], *, quiet: bool) -> list[Path]:
    """
    Return the unfinished runs that no job and no process is executing. Print the state of the others unless `quiet`.

    Args:
        rerun: states of finished runs that are executed again.
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


def _warn(experiments: Iterable[Experiment]) -> None:
    """Warn of settings that work here and may fail or lose work on the cluster."""
    if any(experiment.checkpoint.kind == "none" for experiment in experiments):
        warn(
            "checkpoint=none: a run that is preempted or loses a node starts again at step 1; with checkpoint=dcp it continues"
        )
    for path in {_missing(experiment) for experiment in experiments} - {None}:
        warn(f"data.path: no such file on this machine: {path}. It must exist on the nodes")


def _missing(experiment: Experiment) -> str | None:
    """Return the path of the data if it does not exist on this machine, else None."""
    path = experiment.data.local_path
    if path is None or any(sign in path for sign in "*?["):
        return None
    return None if Path(path).expanduser().exists() else path


def _sbatch(path: Path, text: str, folder: Path) -> str:
    """Write a script and submit it; return the job's number. Raise ConfigError that says how to submit `folder` again."""
    replace_file(path, os.fsencode(text))
    try:
        return slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except ConfigError as error:
        raise ConfigError(
            f"SLURM rejected {shown(path)}: {error}\n"
            f"The runs are pending. Submit them with other settings: meshrunner submit {shown(folder)} hydra.launcher.KEY=VALUE"
        ) from None

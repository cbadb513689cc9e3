"""`meshrunner submit`: run directories -> jobs. What has a result, or a job that lives, is not submitted again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.console import shown, warn
from meshrunner.runner.process.signals import interruptible
from meshrunner.runner.rundir.files import SLURM_JOB, SLURM_SETTINGS, read_json, write_json
from meshrunner.runner.rundir.owner import owned_by, owner_is_alive
from meshrunner.runner.rundir.run import read_config
from meshrunner.runner.rundir.states import RESULTS, read_status, update_status
from meshrunner.runner.slurm import script
from meshrunner.runner.slurm.client import jobs, slurm

if TYPE_CHECKING:
    from meshrunner.runner.slurm.settings import Slurm

POLL_S = 2.0
WAITS = {"state": "pending", "reason": ""}


def job_id(run_dir: Path) -> str | None:
    """The newest job of a run, `12` or `12_3`; None when it was never submitted."""
    found = read_json(run_dir / SLURM_JOB).get("job_id")
    return str(found) if found is not None else None


def submit_run(run_dir: Path, settings: Slurm) -> None:
    """Submit a placed run; raises ConfigError with SLURM's reason."""
    experiment = check(read_config(run_dir))
    settings.fit(experiment)
    if not wanted([run_dir], [], quiet=settings.dry_run):
        return
    text = script.for_run(run_dir, settings, nodes=experiment.launch.nodes, gpus=settings.gpus(experiment))
    if settings.dry_run:
        print(text, end="")
        return
    _advise([experiment])
    update_status(run_dir, **WAITS)
    write_json(run_dir / SLURM_SETTINGS, settings.model_dump())
    number = _sbatch(run_dir / "submit.sbatch", text, run_dir)
    _record({run_dir: number}, run_dir / "submit.sbatch")
    print(f"submitted job {number}\nrun directory: {shown(run_dir)}")


def submit_sweep(sweep_dir: Path, names: Sequence[str], settings: Slurm) -> None:
    """
    Submit the runs of a placed sweep as job arrays, one for each number of nodes.

    Args:
        names: of all run directories, as in runs.txt.
    """
    run_dirs = [sweep_dir / name for name in names]
    experiments = {run_dir: check(read_config(run_dir)) for run_dir in run_dirs}
    rerun = next(iter(experiments.values())).sweep.rerun
    todo = wanted(run_dirs, rerun, quiet=settings.dry_run)
    for run_dir in todo:
        settings.fit(experiments[run_dir])
    groups = arrays([(run_dir, experiments[run_dir]) for run_dir in todo], settings)
    if settings.dry_run:
        print_arrays(sweep_dir, names, groups, settings)
        return
    _advise([experiments[run_dir] for run_dir in todo])
    write_json(sweep_dir / SLURM_SETTINGS, settings.model_dump())
    for run_dir in todo:
        update_status(run_dir, **WAITS)  # now: once submitted, the job may begin at any time
    for number, ((nodes, gpus), members) in enumerate(groups.items()):
        tasks = {run_dirs.index(run_dir): run_dir for run_dir in members}
        path = sweep_dir / ("submit.sbatch" if len(groups) == 1 else f"submit-{number}.sbatch")
        array = _sbatch(path, script.for_sweep(sweep_dir, list(tasks), settings, nodes=nodes, gpus=gpus), sweep_dir)
        _record({run_dir: f"{array}_{task}" for task, run_dir in tasks.items()}, path)
        print(
            f"submitted job array {array}: {len(tasks)} run{'s' * (len(tasks) > 1)} of {nodes} node{'s' * (nodes > 1)}"
        )
    place = shown(sweep_dir)
    print(
        f"sweep directory: {place}\n`meshrunner status {place}` says how far they are, `meshrunner compare {place}` compares"
    )


def arrays(runs: Sequence[tuple[Path, Experiment]], settings: Slurm) -> dict[tuple[int, int | None], list[Path]]:
    """(nodes, GPUs per node) -> runs: the tasks of an array all ask for the same."""
    found: dict[tuple[int, int | None], list[Path]] = {}
    for run_dir, experiment in runs:
        found.setdefault((experiment.launch.nodes, settings.gpus(experiment)), []).append(run_dir)
    return found


def print_arrays(
    sweep_dir: Path, names: Sequence[str], groups: dict[tuple[int, int | None], list[Path]], settings: Slurm
) -> None:
    """What would be submitted, and nothing else."""
    for (nodes, gpus), members in groups.items():
        tasks = [names.index(run_dir.name) for run_dir in members]
        print(script.for_sweep(sweep_dir, tasks, settings, nodes=nodes, gpus=gpus), end="")


def wait(run_dirs: Sequence[Path]) -> int:
    """Return when no job of these runs lives any more; the exit status as after a local sweep."""
    ids = [found for run_dir in run_dirs if (found := job_id(run_dir))]
    with interruptible("; the jobs stay in SLURM's queue"):
        while _live(ids):
            time.sleep(POLL_S)
    states = [str(read_status(run_dir).get("state")) for run_dir in run_dirs]
    return 0 if all(state in RESULTS for state in states) else 75 if "preempted" in states else 1


def _live(ids: Sequence[str]) -> bool:
    try:
        return any(job.lives for job in jobs(ids).values())
    except ConfigError as error:  # a controller that is restarted says nothing of the jobs
        warn(str(error))
        return True


def wanted(run_dirs: Sequence[Path], rerun: Sequence[str], *, quiet: bool) -> list[Path]:
    """What has no result and nobody at work on it; the rest is named."""
    known = jobs(found for run_dir in run_dirs if (found := job_id(run_dir)))
    todo: list[Path] = []
    say: Callable[[str], object] = (lambda _: None) if quiet else print
    for run_dir in run_dirs:
        status, number = read_status(run_dir), job_id(run_dir)
        state, job = status.get("state"), known.get(number or "")
        if state in RESULTS and state not in rerun:
            reason = f": {status['reason']}" if status.get("reason") else ""
            say(f"{run_dir.name} is {state}{reason}")
        elif job is not None and job.lives:
            say(f"{run_dir.name} has job {number}: {job}")
        elif owner_is_alive(status):
            say(f"{run_dir.name} {owned_by(status)}")
        else:
            todo.append(run_dir)
    return todo


def _advise(experiments: Sequence[Experiment]) -> None:
    """What submits well and disappoints later."""
    if any(experiment.checkpoint.kind == "none" for experiment in experiments):
        warn(
            "checkpoint=none: a run that is preempted or loses a node begins again at step 1; checkpoint=dcp continues it"
        )
    for path in {_missing(experiment) for experiment in experiments} - {None}:
        warn(f"data.path: {path} is not on this machine; it must be on the nodes")


def _missing(experiment: Experiment) -> str | None:
    path: Any = getattr(experiment.data, "path", None)
    if not isinstance(path, str) or any(sign in path for sign in "*?["):
        return None
    return None if Path(path).expanduser().exists() else path


def _sbatch(path: Path, text: str, kept: Path) -> str:
    """Write a script and submit it; returns the job's number."""
    path.write_text(text)
    try:
        return slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except ConfigError as error:
        raise ConfigError(
            f"SLURM refuses {shown(path)}: {error}\n"
            f"The runs are pending: `meshrunner submit {shown(kept)} hydra.launcher.KEY=VALUE` submits them otherwise"
        ) from None


def _record(numbers: dict[Path, str], path: Path) -> None:
    for run_dir, number in numbers.items():
        write_json(run_dir / SLURM_JOB, {"job_id": number, "submitted": time.time(), "script": str(path)})

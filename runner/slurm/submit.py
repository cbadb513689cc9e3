"""`meshrunner submit`: run directories -> jobs. What has a result, or a job that lives, is not submitted again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.option import ConfigError
from runner.execute import signals
from runner.experiment import Experiment, check
from runner.jobs import CRASHED, RESULTS
from runner.progress import warn
from runner.report import shown
from runner.rundir import owner_is_alive, read_config, read_json, read_status, update_status, write_json
from runner.slurm import script
from runner.slurm.queue import jobs, slurm

if TYPE_CHECKING:
    from runner.slurm.settings import Slurm

RECORD = "slurm.json"
"""In a run directory: {"job_id", "submitted", "script"} of its newest job."""
SETTINGS = "submit.json"
"""In a sweep's or a run's directory: the settings of the last submission."""
POLL_S = 2.0


def job_id(run_dir: Path) -> str | None:
    """The newest job of a run, `12` or `12_3`; None when it was never submitted."""
    found = read_json(run_dir / RECORD).get("job_id")
    return str(found) if found is not None else None


def submit_run(run_dir: Path, settings: Slurm) -> None:
    """Submit a placed run; raises ConfigError with SLURM's reason."""
    if not _wanted([run_dir], []):
        return
    experiment = check(read_config(run_dir))
    _advise([experiment])
    text = script.for_run(run_dir, settings, nodes=experiment.launch.nodes, gpus=settings.gpus(experiment))
    number = _sbatch(run_dir / "submit.sbatch", text, run_dir)
    _record({run_dir: number}, run_dir / "submit.sbatch")
    write_json(run_dir / SETTINGS, settings.model_dump())
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
    todo = _wanted(run_dirs, rerun)
    _advise([experiments[run_dir] for run_dir in todo])
    write_json(sweep_dir / SETTINGS, settings.model_dump())
    groups = arrays([(run_dir, experiments[run_dir]) for run_dir in todo], settings)
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


def wait(run_dirs: Sequence[Path]) -> int:
    """Return when no job of these runs lives any more; the exit status as after a local sweep."""
    ids = {run_dir: found for run_dir in run_dirs if (found := job_id(run_dir))}
    with signals("; the jobs stay in SLURM's queue"):
        while any(job.lives for job in jobs(ids.values()).values()):
            time.sleep(POLL_S)
    states = [str(read_status(run_dir).get("state")) for run_dir in run_dirs]
    return 1 if any(state in CRASHED or state not in RESULTS for state in states) else 0


def _wanted(run_dirs: Sequence[Path], rerun: Sequence[str]) -> list[Path]:
    """What has no result and nobody at work on it; the rest is named."""
    known = jobs(found for run_dir in run_dirs if (found := job_id(run_dir)))
    wanted = []
    for run_dir in run_dirs:
        status, number = read_status(run_dir), job_id(run_dir)
        state, job = status.get("state"), known.get(number or "")
        if state in RESULTS and state not in rerun:
            reason = f": {status['reason']}" if status.get("reason") else ""
            print(f"{run_dir.name} is {state}{reason}")
        elif job is not None and job.lives:
            print(f"{run_dir.name} has job {number}: {job}")
        elif owner_is_alive(status):
            print(f"{run_dir.name} is being executed by process {status['owner']['pid']} on {status['owner']['host']}")
        else:
            update_status(run_dir, state="pending", reason="")  # now: once submitted, the job may begin at any time
            wanted.append(run_dir)
    return wanted


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
        write_json(run_dir / RECORD, {"job_id": number, "submitted": time.time(), "script": str(path)})

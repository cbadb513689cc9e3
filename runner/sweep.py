"""The local launcher: every run of a sweep is checked and placed on disk before the first begins."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.checkpoint.stored import differences
from recipes.option import ConfigError, Incompatible
from runner.compose import Composed, split
from runner.devices import resolve
from runner.exclude import excluding
from runner.experiment import Experiment, Sweep, check
from runner.jobs import run_jobs
from runner.resume import fit_continuing
from runner.rundir import place, read_config, read_json, read_status, update_status, write_json

if TYPE_CHECKING:
    from runner.compose import Composer

NAME_LENGTH = 100
SHOWN = 5
"""Problems, and jobs of a problem, that are listed."""


@dataclass(frozen=True)
class Run:
    """A run directory to be."""

    composed: Composed
    reason: str
    """Why it cannot work; empty when it can."""

    @property
    def run_dir(self) -> Path:
        return self.composed.run_dir


@dataclass(frozen=True)
class Job:
    """One combination of a sweep: a run, or several that differ in their seed or in nothing."""

    overrides: list[str]
    hydra: DictConfig
    experiment: Experiment
    runs: list[Run]
    """In the order of `sweep.repeat` x `sweep.seeds`."""


@dataclass(frozen=True)
class Batch:
    """Jobs that a sweeper has handed over at once, and that have ended."""

    sweep_dir: Path
    exit_status: int


class Stopped(Exception):
    """By `sweep.fail_fast`: the sweeper is not to hand over more jobs."""


def run_sweep(composer: Composer) -> int:
    """Run a sweep from the command line; exit status 1 when a run failed, crashed or timed out."""
    from runner.conclusion import conclude

    # What the sweeper returns says nothing: some return nothing at all.
    batches: list[Batch] = []
    try:
        with suppress(Stopped):
            composer.sweep(batches.append)
    except OSError as error:
        raise ConfigError(f"the sweep directory cannot be written: {error}") from None
    except Exception:  # a sweeper that decides as it goes may ask for something wrong after hours
        if batches:
            conclude(batches[0].sweep_dir)
        raise
    if batches:
        conclude(batches[0].sweep_dir)
    return max((batch.exit_status for batch in batches), default=0)


def resume_sweep(sweep_dir: Path) -> int:
    """Execute what of a sweep on disk has no result; returns its exit status."""
    from runner.conclusion import conclude

    names = [str(job["name"]) for job in read_json(sweep_dir / "sweep.json")["jobs"]]
    run_dirs = [sweep_dir / name for name in names if (sweep_dir / name / "config.yaml").exists()]
    if not run_dirs:
        raise ConfigError(f"{sweep_dir} holds no run of a sweep")
    status, _ = run_jobs(run_dirs, check(read_config(run_dirs[0])).sweep)
    conclude(sweep_dir)
    return status


def launch_jobs(
    loader: Any,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    ended: Callable[[Batch], object],
) -> list[JobReturn]:
    """What Hydra's sweeper calls: all combinations of a batch at once. Raises ConfigError that lists all wrong ones."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    jobs: list[Job] = []
    wrong: dict[str, list[str]] = {}
    varying = _varying(job_overrides) - set(config.hydra.overrides.task)
    for number, overrides in enumerate(job_overrides, first):
        own = [override for override in overrides if override in varying]
        try:
            job = _compose_job(loader, config, list(overrides), number, sweep_dir / job_name(number, own))
            for run in job.runs:
                _check_place(run)
            jobs.append(job)
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(f"job {number} ({' '.join(own)})")
    if wrong:
        _remove_empty(sweep_dir)
        raise ConfigError("\n".join(_wrong_jobs(wrong)))
    for job in jobs:
        for run in job.runs:
            _place(run)
    # Repeats are interleaved: what drifts on a machine meets every combination alike.
    rounds = zip(*([(job, run) for run in job.runs] for job in jobs), strict=True)
    ordered = [(job.overrides, run.run_dir) for one in rounds for job, run in one]
    _record_sweep(sweep_dir, ordered)
    status, stop = run_jobs([run_dir for _, run_dir in ordered], jobs[0].experiment.sweep)
    ended(Batch(sweep_dir, status))
    if stop:
        raise Stopped
    worst = math.inf if minimizes(config) else -math.inf
    return [_returned(job, worst) for job in jobs]


def minimizes(config: DictConfig) -> bool:
    """Whether the sweeper looks for the lowest value, in the words of Optuna's, Ax's and Nevergrad's."""
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    maximize = OmegaConf.select(config, "hydra.sweeper.optim.maximize")
    return (
        getattr(direction, "name", direction) == "minimize"
        or OmegaConf.select(config, "hydra.sweeper.ax_config.experiment.minimize") is True
        or maximize is False
    )


def _compose_job(loader: Any, config: DictConfig, overrides: list[str], number: int, run_dir: Path) -> Job:
    composed_config = loader.load_sweep_config(config, overrides)
    with open_dict(composed_config):
        composed_config.hydra.job.id, composed_config.hydra.job.num = str(number), number
    composed = split(composed_config, run_dir)
    hydra = OmegaConf.masked_copy(composed_config, ["hydra"])
    experiment, reason = check(composed.config), ""
    try:
        if rule := excluding(experiment.sweep.exclude, composed):
            raise Incompatible(f"sweep.exclude: {rule}")
        fit_continuing(experiment, run_dir, resolve(experiment)[1])
    except Incompatible as error:
        reason = str(error)
    return Job(overrides, hydra, experiment, _repeated(composed, run_dir, reason, experiment.sweep))


def _repeated(composed: Composed, run_dir: Path, reason: str, sweep: Sweep) -> list[Run]:
    runs = []
    for repeat in range(1, sweep.repeat + 1):
        for seed in range(composed.config["seed"], composed.config["seed"] + sweep.seeds):
            name = run_dir.name
            name += f"_seed-{seed}" if sweep.seeds > 1 else ""
            name += f"_repeat-{repeat}" if sweep.repeat > 1 else ""
            own = replace(composed, config=composed.config | {"seed": seed}, run_dir=run_dir.with_name(name))
            runs.append(Run(own, reason))
    return runs


def _check_place(run: Run) -> None:
    """A run directory of an earlier start of the sweep is taken up only when it is of the same run."""
    if not (run.run_dir / "config.yaml").exists():
        return
    there, here = (
        {k: v for k, v in c.items() if k != "sweep"} for c in (read_config(run.run_dir), run.composed.config)
    )
    changed = [f"  {key}: {old!r} there, {new!r} now" for key, old, new in differences(there, here)]
    if changed:
        lines = "\n".join(changed)
        raise ConfigError(f"{run.run_dir} holds another run; choose another hydra.sweep.dir:\n{lines}")


def _place(run: Run) -> None:
    if not (run.run_dir / "config.yaml").exists():
        place(run.composed.config, run.run_dir, run.composed.overrides)
    state = read_status(run.run_dir).get("state")
    if run.reason and state == "pending":
        update_status(run.run_dir, state="skipped", reason=run.reason)
    elif state == "skipped" and not run.reason:
        update_status(run.run_dir, state="pending", reason="")


def _wrong_jobs(wrong: dict[str, list[str]]) -> Iterator[str]:
    """One paragraph for each problem, however many jobs have it."""
    for problem, names in list(wrong.items())[:SHOWN]:
        more = f" and {len(names) - SHOWN} more jobs" if len(names) > SHOWN else ""
        yield f"{', '.join(names[:SHOWN])}{more}: {problem}"
    if len(wrong) > SHOWN:
        yield f"... and {len(wrong) - SHOWN} more problems"


def _remove_empty(sweep_dir: Path) -> None:
    """Hydra's sweeper has made the folder and a file in it; of a sweep that was refused nothing is to be left."""
    if {path.name for path in sweep_dir.iterdir()} == {"multirun.yaml"}:
        (sweep_dir / "multirun.yaml").unlink()
        sweep_dir.rmdir()


def _varying(job_overrides: Sequence[Sequence[str]]) -> set[str]:
    """The overrides that not all jobs have in common; all of them when there is only one job, of many perhaps."""
    sets = [set(overrides) for overrides in job_overrides]
    shared = set.intersection(*sets) if len(sets) > 1 else set()
    return set.union(*sets) - shared


def job_name(number: int, overrides: list[str]) -> str:
    """`003_parallelism-fsdp2_shard-2`: number and what varies, at most NAME_LENGTH characters, then a hash."""
    parts = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        parts.append(f"{key.rpartition('.')[2]}-{value}")
    name = "_".join([f"{number:03}", *(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-") for part in parts)])
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[:NAME_LENGTH]}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _record_sweep(sweep_dir: Path, runs: list[tuple[list[str], Path]]) -> None:
    """Sweepers that decide as they go hand over their jobs batch by batch; a sweep that is taken up has them already."""
    path = sweep_dir / "sweep.json"
    known = read_json(path).get("jobs", [])
    added = [{"name": run_dir.name, "overrides": overrides} for overrides, run_dir in runs]
    write_json(path, {"command": sys.argv, "jobs": known + [job for job in added if job not in known]})


def _returned(job: Job, worst: float) -> JobReturn:
    """What the sweeper is told of a job: the median objective of its runs, the worst value when one has none."""
    values = []
    for run in job.runs:
        summary = read_json(run.run_dir / "summary.json")
        value = summary.get(job.experiment.objective)
        values.append(worst if value is None or summary.get("state") != "completed" else float(value))
    result = JobReturn(
        overrides=job.overrides,
        cfg=OmegaConf.create(job.runs[0].composed.config),
        hydra_cfg=job.hydra,
        working_dir=str(job.runs[0].run_dir),
        task_name="meshrunner",
    )
    result.status, result.return_value = JobStatus.COMPLETED, median(values) if worst not in values else worst
    return result

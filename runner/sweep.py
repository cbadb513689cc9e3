"""The local launcher: every run of a sweep is checked and placed on disk before the first begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from recipes.option import ConfigError
from runner.batch import Batch, Here, Job, checked
from runner.experiment import check
from runner.jobs import RESULTS, run_jobs
from runner.nodes import only_this_node
from runner.rundir import read_config, read_json, read_status

if TYPE_CHECKING:
    from runner.compose import Composer


@dataclass(frozen=True)
class Ended:
    """The jobs that a sweeper has handed over at once have ended."""

    sweep_dir: Path
    exit_status: int


class Stopped(Exception):
    """By `sweep.fail_fast`: the sweeper is not to hand over more jobs."""


def run_sweep(composer: Composer) -> int:
    """Run a sweep from the command line; exit status 1 when a run failed, crashed or timed out."""
    from runner.conclusion import conclude

    # What the sweeper returns says nothing: some return nothing at all.
    batches: list[Ended] = []
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
    for run_dir in run_dirs:
        if read_status(run_dir).get("state") not in RESULTS:
            only_this_node(read_config(run_dir)["launch"]["nodes"])
    status, _ = run_jobs(run_dirs, check(read_config(run_dirs[0])).sweep)
    conclude(sweep_dir)
    return status


def launch_jobs(
    loader: Any,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    ended: Callable[[Ended], object],
) -> list[JobReturn]:
    """What Hydra's sweeper calls: all combinations of a batch at once. Raises ConfigError that lists all wrong ones."""
    batch = checked(loader, config, job_overrides, first, Here())
    status, stop = run_jobs(batch.place(), batch.jobs[0].experiment.sweep)
    ended(Ended(batch.sweep_dir, status))
    if stop:
        raise Stopped
    return returned(batch, config)


def returned(batch: Batch, config: DictConfig) -> list[JobReturn]:
    """What the sweeper is told of the jobs of a batch that has ended."""
    worst = math.inf if minimizes(config) else -math.inf
    return [_returned(job, worst) for job in batch.jobs]


def minimizes(config: DictConfig) -> bool:
    """Whether the sweeper looks for the lowest value, in the words of Optuna's, Ax's and Nevergrad's."""
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    maximize = OmegaConf.select(config, "hydra.sweeper.optim.maximize")
    return (
        getattr(direction, "name", direction) == "minimize"
        or OmegaConf.select(config, "hydra.sweeper.ax_config.experiment.minimize") is True
        or maximize is False
    )


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

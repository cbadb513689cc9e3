"""Hydra's launchers: every run of a sweep is checked and placed on disk before the first begins.

`local` executes them here, `slurm` submits them, `place` does no more.
"""

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

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.experiment import check
from meshrunner.runner.launch.nodes import only_this_node
from meshrunner.runner.rundir.files import SUMMARY, is_run, read_json
from meshrunner.runner.rundir.run import read_config
from meshrunner.runner.rundir.states import RESULTS, read_state
from meshrunner.runner.rundir.sweep import run_names
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.slurm.submit import job_arrays, print_arrays, submit_sweep, to_submit, wait
from meshrunner.runner.sweep.combinations import (
    Combination,
    ConfiguredTarget,
    LocalTarget,
    SweepBatch,
    check_batch,
    remove_empty,
)
from meshrunner.runner.sweep.execute_all import execute_all
from meshrunner.runner.sweep.finish import finish_sweep

if TYPE_CHECKING:
    from meshrunner.runner.config.compose import Composer


BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class EndedBatch:
    """The jobs that a sweeper has handed over at once have ended."""

    sweep_dir: Path
    exit_status: int


class StopSweep(Exception):
    """By `sweep.fail_fast`: the sweeper is not to hand over more jobs."""


def run_sweep(composer: Composer) -> int:
    """Run a sweep from the command line; exit status 1 when a run failed, crashed or timed out."""
    # What the sweeper returns says nothing: some return nothing at all.
    batches: list[EndedBatch] = []
    try:
        with suppress(StopSweep):
            composer.sweep(batches.append)
    except OSError as error:
        raise ConfigError(f"the sweep directory cannot be written: {error}") from None
    except Exception:  # a sweeper that decides as it goes may ask for something wrong after hours
        if batches:
            finish_sweep(batches[0].sweep_dir)
        raise
    if batches:
        finish_sweep(batches[0].sweep_dir)
    return max((batch.exit_status for batch in batches), default=0)


def resume_sweep(sweep_dir: Path) -> int:
    """Execute the unfinished runs of a sweep on disk; returns its exit status."""
    run_dirs = [sweep_dir / name for name in run_names(sweep_dir) if is_run(sweep_dir / name)]
    if not run_dirs:
        raise ConfigError(f"{sweep_dir} holds no run of a sweep")
    for run_dir in run_dirs:
        if read_state(run_dir) not in RESULTS:
            only_this_node(read_config(run_dir)["launch"]["nodes"])
    status, _ = execute_all(run_dirs, check(read_config(run_dirs[0])).sweep)
    finish_sweep(sweep_dir)
    return status


def launch_local(
    loader: Any,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    ended: Callable[[EndedBatch], object],
) -> list[JobReturn]:
    """What Hydra's sweeper calls: all combinations of a batch at once. Raises ConfigError that lists all wrong ones."""
    batch = check_batch(loader, config, job_overrides, first, LocalTarget())
    status, stop = execute_all(batch.place(), batch.combinations[0].experiment.sweep)
    ended(EndedBatch(batch.sweep_dir, status))
    if stop:
        raise StopSweep
    return returned(batch, config)


def launch_slurm(
    loader: Any,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    ended: Callable[[EndedBatch], object],
) -> list[JobReturn]:
    """What Hydra's sweeper calls under hydra/launcher=slurm: all combinations of a batch at once."""
    try:
        settings = _settings(config.hydra.launcher)
        if not settings.wait and not settings.dry_run and config.hydra.sweeper._target_ != BASIC:
            raise ConfigError("this sweeper learns from the runs it has had: it needs hydra.launcher.wait=true")
    except ConfigError:
        remove_empty(Path(config.hydra.sweep.dir).absolute())
        raise
    batch = check_batch(loader, config, job_overrides, first, settings)
    if settings.dry_run:
        runs = {run.run_dir: job.experiment for job, run in batch.ordered if not run.reason}
        todo = to_submit(list(runs), batch.combinations[0].experiment.sweep.rerun, quiet=True)
        arrays = job_arrays(batch.names(), {run_dir: runs[run_dir] for run_dir in todo}, settings)
        print_arrays(batch.sweep_dir, arrays, settings)
        remove_empty(batch.sweep_dir)
        return []
    run_dirs = batch.place()
    submit_sweep(batch.sweep_dir, batch.names(), settings)
    if not settings.wait:
        return []
    ended(EndedBatch(batch.sweep_dir, wait(run_dirs)))
    return returned(batch, config)


def launch_place(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """What Hydra's sweeper calls for `meshrunner place -m`."""
    batch = check_batch(loader, config, job_overrides, first, ConfiguredTarget())
    batch.place()
    print(f"sweep directory: {batch.sweep_dir}")
    return []


def returned(batch: SweepBatch, config: DictConfig) -> list[JobReturn]:
    """What the sweeper is told of the jobs of a batch that has ended."""
    worst = math.inf if minimizes(config) else -math.inf
    return [_returned(job, worst) for job in batch.combinations]


def minimizes(config: DictConfig) -> bool:
    """Whether the sweeper looks for the lowest value, in the words of Optuna's, Ax's and Nevergrad's."""
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    maximize = OmegaConf.select(config, "hydra.sweeper.optim.maximize")
    return (
        getattr(direction, "name", direction) == "minimize"
        or OmegaConf.select(config, "hydra.sweeper.ax_config.experiment.minimize") is True
        or maximize is False
    )


def _returned(job: Combination, worst: float) -> JobReturn:
    """What the sweeper is told of a job: the median objective of its runs, the worst value when one has none."""
    values = []
    for run in job.runs:
        summary = read_json(run.run_dir / SUMMARY)
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


def _settings(launcher: DictConfig) -> Slurm:
    plain = OmegaConf.to_container(launcher, resolve=True)
    assert isinstance(plain, dict)
    return Slurm.read({str(key): value for key, value in plain.items()})

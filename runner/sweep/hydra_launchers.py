"""Runs a sweep through Hydra: its sweeper passes batches of jobs to one of three launchers.

Each launcher checks and writes all runs of a batch before the first one starts. Then `local` executes the runs, `slurm` submits
them, and `place` does nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import Composer, plain
from meshrunner.runner.config.hydra.private import BASIC_SWEEPER
from meshrunner.runner.config.placed import usable_runs
from meshrunner.runner.console import say, shown
from meshrunner.runner.launch.nodes import only_this_node
from meshrunner.runner.rundir import RESULTS, Summary, read_config, read_state, run_names
from meshrunner.runner.rundir.files import MULTIRUN, SUMMARY, SWEEP
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.slurm.submit import job_arrays, print_scripts, submit_sweep, to_submit, wait
from meshrunner.runner.sweep.combinations import (
    Combination,
    ConfiguredTarget,
    LocalTarget,
    SweepBatch,
    Target,
    check_batch,
)
from meshrunner.runner.sweep.direction import check_direction, minimizes
from meshrunner.runner.sweep.execute_all import execute_all
from meshrunner.runner.sweep.preflight import with_predictions
from meshrunner.runner.sweep.results import finish_sweep


@dataclass(frozen=True)
class EndedBatch:
    """A batch whose runs have ended."""

    sweep_dir: Path
    exit_status: int


Ended = Callable[[EndedBatch], object]


class StopSweep(Exception):
    """Ends the sweeper before further jobs, because of `sweep.fail_fast` or a stop request."""


def run_sweep(composer: Composer) -> int:
    """Run a sweep from the command line; return its exit status, 1 if a run failed, crashed or timed out."""
    # Some sweepers return nothing, so the launcher reports each batch.
    batches: list[EndedBatch] = []
    config = composer.compose_sweep()
    check_direction(config)
    try:
        with _restored_unless_placed(Path(config.hydra.sweep.dir).absolute()), suppress(StopSweep):
            composer.sweep(config, batches.append)
    except MissingConfigException:
        raise  # it is an OSError, too
    except OSError as error:
        raise ConfigError(f"hydra.sweep.dir: the sweep directory cannot be written: {error}") from None
    except Exception:  # an adaptive sweeper may launch a wrong job after hours
        if batches:
            finish_sweep(batches[0].sweep_dir)
        raise
    if batches:
        finish_sweep(batches[0].sweep_dir)
    return max((batch.exit_status for batch in batches), default=0)


@contextmanager
def _restored_unless_placed(sweep_dir: Path) -> Iterator[None]:
    """Restore the sweep directory if no run was placed: Hydra's sweepers create it before anything is checked."""
    record, placed = sweep_dir / MULTIRUN, sweep_dir / SWEEP
    before = record.read_bytes() if record.is_file() else None
    since = placed.stat().st_mtime_ns if placed.exists() else None
    created = [folder for folder in (sweep_dir, *sweep_dir.parents) if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # a directory that is not empty or was removed
            if since == (placed.stat().st_mtime_ns if placed.exists() else None):
                if before is None:
                    record.unlink(missing_ok=True)
                else:
                    record.write_bytes(before)
                for folder in created:
                    folder.rmdir()


def resume_sweep(sweep_dir: Path) -> int:
    """Execute the unfinished runs of a sweep on disk; return the exit status, 1 if one of them is damaged."""
    run_dirs, first, damaged = usable_runs(sweep_dir, run_names(sweep_dir))
    say(f"sweep directory: {shown(sweep_dir)}")
    for run_dir in run_dirs:
        if read_state(run_dir) not in RESULTS:
            only_this_node(read_config(run_dir)["launch"]["nodes"])
    status, _ = execute_all(run_dirs, first)
    finish_sweep(sweep_dir)
    return status or int(damaged > 0)


def _checked(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, target: Target
) -> SweepBatch:
    return with_predictions(check_batch(loader, config, job_overrides, first, target), target)


def launch_local(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, ended: Ended
) -> list[JobReturn]:
    """Execute a batch of jobs on this node; raises ConfigError that lists all invalid jobs, and StopSweep."""
    batch = _checked(loader, config, job_overrides, first, LocalTarget())
    if first == 0:
        say(f"sweep directory: {shown(batch.sweep_dir)}")
    status, stop = execute_all(batch.place(), batch.combinations[0].experiment)
    ended(EndedBatch(batch.sweep_dir, status))
    if stop:
        raise StopSweep
    return job_returns(batch, config)


def launch_slurm(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, ended: Ended
) -> list[JobReturn]:
    """Submit a batch of jobs to SLURM; raises ConfigError that lists all invalid jobs."""
    settings = Slurm.read(plain(config.hydra.launcher))
    if not settings.wait and not settings.dry_run and config.hydra.sweeper._target_ != BASIC_SWEEPER:
        raise ConfigError(
            "hydra.launcher.wait: this sweeper needs the results of each batch; use hydra.launcher.wait=true"
        )
    batch = _checked(loader, config, job_overrides, first, settings)
    if settings.dry_run:
        runs = {run.run_dir: job.experiment for job, run in batch.ordered if not run.reason}
        todo = to_submit(list(runs), batch.combinations[0].experiment.sweep.rerun, quiet=True)
        chosen = {run_dir: runs[run_dir] for run_dir in todo}
        print_scripts(job_arrays(batch.sweep_dir, batch.names(), chosen, settings), settings)
        return []
    run_dirs = batch.place()
    submit_sweep(batch.sweep_dir, batch.names(), settings)
    if not settings.wait:
        return []
    ended(EndedBatch(batch.sweep_dir, wait(run_dirs)))
    return job_returns(batch, config)


def launch_place(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Write the run directories of a batch for `meshrunner place -m`; raises ConfigError that lists all invalid jobs."""
    batch = _checked(loader, config, job_overrides, first, ConfiguredTarget())
    batch.place()
    say(f"sweep directory: {batch.sweep_dir}")
    return []


def job_returns(batch: SweepBatch, config: DictConfig) -> list[JobReturn]:
    """Return the results of a batch for the sweeper."""
    worst = math.inf if minimizes(config) else -math.inf
    return [_job_return(job, worst) for job in batch.combinations]


def _job_return(job: Combination, worst: float) -> JobReturn:
    """Return the median objective of a job's runs for the sweeper, or `worst` if one of them has none."""
    values = []
    for run in job.runs:
        summary = Summary.read(run.run_dir / SUMMARY)
        value = summary.figures.get(job.experiment.objective)
        values.append(worst if value is None or summary.state != "completed" else value)
    result = JobReturn(
        overrides=job.overrides,
        cfg=OmegaConf.create(job.runs[0].composed.config),
        hydra_cfg=job.hydra,
        working_dir=str(job.runs[0].run_dir),
        task_name="meshrunner",
    )
    result.status, result.return_value = JobStatus.COMPLETED, median(values) if worst not in values else worst
    return result

"""Hydra's launchers: every run of a sweep is checked and placed before the first begins.

`local` then executes the runs, `slurm` submits them, `place` does nothing more.
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
from meshrunner.runner.config.compose import Composer, plain, typed
from meshrunner.runner.config.hydra.private import BASIC_SWEEPER
from meshrunner.runner.config.placed import usable_runs
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.figures import higher_is_better
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
from meshrunner.runner.sweep.execute_all import execute_all
from meshrunner.runner.sweep.finish import finish_sweep
from meshrunner.runner.sweep.preflight import with_predictions


@dataclass(frozen=True)
class EndedBatch:
    """The result of a batch of jobs."""

    sweep_dir: Path
    exit_status: int


Ended = Callable[[EndedBatch], object]

DIRECTIONS = {
    "hydra.sweeper.direction": "hydra.sweeper.direction=maximize",
    "hydra.sweeper.optim.maximize": "hydra.sweeper.optim.maximize=true",
    "hydra.sweeper.ax_config.experiment.minimize": "hydra.sweeper.ax_config.experiment.minimize=false",
}
"""Where the Optuna, Nevergrad and Ax sweepers keep their direction, and how it is turned."""


class StopSweep(Exception):
    """The sweeper must not launch more jobs: `sweep.fail_fast`, or a stop was requested."""


def run_sweep(composer: Composer) -> int:
    """Run a sweep from the command line; exit status 1 when a run failed, crashed or timed out."""
    # Not from the sweeper's return value: some return nothing.
    batches: list[EndedBatch] = []
    config = composer.compose_sweep()
    _check_direction(config)
    try:
        with _nothing_left_behind(Path(config.hydra.sweep.dir).absolute()), suppress(StopSweep):
            composer.sweep(config, batches.append)
    except MissingConfigException:
        raise  # an OSError of Hydra's
    except OSError as error:
        raise ConfigError(f"the sweep directory cannot be written: {error}") from None
    except Exception:  # an adaptive sweeper may launch a wrong job after hours
        if batches:
            finish_sweep(batches[0].sweep_dir)
        raise
    if batches:
        finish_sweep(batches[0].sweep_dir)
    return max((batch.exit_status for batch in batches), default=0)


@contextmanager
def _nothing_left_behind(sweep_dir: Path) -> Iterator[None]:
    """Where no run was placed, leave the folder as it was: Hydra's sweepers create it before anything is checked."""
    record, placed = sweep_dir / MULTIRUN, sweep_dir / SWEEP
    before = record.read_bytes() if record.is_file() else None
    since = placed.stat().st_mtime_ns if placed.exists() else None
    created = [folder for folder in (sweep_dir, *sweep_dir.parents) if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that is not empty, or gone
            if since == (placed.stat().st_mtime_ns if placed.exists() else None):
                if before is None:
                    record.unlink(missing_ok=True)
                elif record.read_bytes() != before:
                    record.write_bytes(before)
                for folder in created:
                    folder.rmdir()


def resume_sweep(sweep_dir: Path) -> int:
    """Execute the unfinished runs of a sweep on disk; returns its exit status, 1 where one of them is damaged."""
    run_dirs, first, damaged = usable_runs(sweep_dir, run_names(sweep_dir))
    _say_where(sweep_dir)
    for run_dir in run_dirs:
        if read_state(run_dir) not in RESULTS:
            only_this_node(read_config(run_dir)["launch"]["nodes"])
    status, _ = execute_all(run_dirs, first)
    finish_sweep(sweep_dir)
    return status or int(damaged > 0)


def _say_where(sweep_dir: Path) -> None:
    """What a person needs to look at a sweep, or to stop it, while it runs."""
    say(f"sweep directory: {shown(sweep_dir)}")


def _checked(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, target: Target
) -> SweepBatch:
    """Return a batch, checked and predicted; raises ConfigError that lists all wrong jobs."""
    return with_predictions(check_batch(loader, config, job_overrides, first, target), target)


def launch_local(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, ended: Ended
) -> list[JobReturn]:
    """Launch a batch of jobs on this node, for Hydra's sweeper. Raises ConfigError that lists all wrong ones, and StopSweep."""
    batch = _checked(loader, config, job_overrides, first, LocalTarget())
    if first == 0:
        _say_where(batch.sweep_dir)
    status, stop = execute_all(batch.place(), batch.combinations[0].experiment)
    ended(EndedBatch(batch.sweep_dir, status))
    if stop:
        raise StopSweep
    return job_returns(batch, config)


def launch_slurm(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, ended: Ended
) -> list[JobReturn]:
    """Submit a batch of jobs to SLURM, for Hydra's sweeper. Raises ConfigError that lists all wrong ones."""
    settings = Slurm.read(plain(config.hydra.launcher))
    if not settings.wait and not settings.dry_run and config.hydra.sweeper._target_ != BASIC_SWEEPER:
        raise ConfigError("this sweeper learns from the results of runs: it needs hydra.launcher.wait=true")
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
    """Place a batch of jobs, for Hydra's sweeper under `meshrunner place -m`. Raises ConfigError that lists all wrong ones."""
    batch = _checked(loader, config, job_overrides, first, ConfiguredTarget())
    batch.place()
    say(f"sweep directory: {batch.sweep_dir}")
    return []


def job_returns(batch: SweepBatch, config: DictConfig) -> list[JobReturn]:
    """Return the results of a batch, for the sweeper."""
    worst = math.inf if minimizes(config) else -math.inf
    return [_job_return(job, worst) for job in batch.combinations]


def minimizes(config: DictConfig) -> bool:
    """Return whether the sweeper minimises: the settings of the Optuna, Ax and Nevergrad sweepers."""
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    maximize = OmegaConf.select(config, "hydra.sweeper.optim.maximize")
    return (
        getattr(direction, "name", direction) == "minimize"
        or OmegaConf.select(config, "hydra.sweeper.ax_config.experiment.minimize") is True
        or maximize is False
    )


def _check_direction(config: DictConfig) -> None:
    """
    Compare the direction of an adaptive sweeper with the objective, and warn where it looks for the worst.

    Raises:
        ConfigError: it minimises what should be high, and nobody said so: some sweepers do by default.
    """
    if config.hydra.sweeper._target_ == BASIC_SWEEPER:
        return
    objective, given = str(config.get("objective")), " ".join(typed(config.hydra.overrides.hydra))
    if minimizes(config) and higher_is_better(objective):
        if not any(key in given for key in DIRECTIONS):
            raise ConfigError(
                f"this sweeper minimises, and the objective {objective} is better when it is high: add "
                f"{next(text for key, text in DIRECTIONS.items() if OmegaConf.select(config, key) is not None)}"
            )
        warn(f"the sweeper looks for the lowest {objective}")
    elif not minimizes(config) and not higher_is_better(objective):
        warn(f"the sweeper looks for the highest {objective}")


def _job_return(job: Combination, worst: float) -> JobReturn:
    """Return the result of a job, for the sweeper: the median objective of its runs, the worst value when one has none."""
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

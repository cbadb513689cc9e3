"""Runs a sweep through Hydra, whose sweeper passes jobs to a launcher in batches. A job is one combination of overrides.
Before the first run of a batch starts, the launcher checks all jobs of the batch and writes their run directories."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import Composer, plain, typed
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.hydra.private import BASIC_SWEEPER, TUNE_SWEEPER
from meshrunner.runner.config.resumable import usable_runs
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.figures import higher_is_better
from meshrunner.runner.launch.nodes import workers_of_sweep
from meshrunner.runner.process.receipt import record
from meshrunner.runner.rundir import RESULTS, Summary, key_of, read_config, read_state, run_names
from meshrunner.runner.rundir.files import MULTIRUN, SUMMARY, SWEEP, TUNE
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.slurm.submit import submit_runs, to_submit, wait
from meshrunner.runner.sweep.combinations import Jobs, SweepBatch, Target, check_batch, configured_workers
from meshrunner.runner.sweep.execute_all import execute_all
from meshrunner.runner.sweep.preflight import with_predictions
from meshrunner.runner.sweep.results import finish_sweep
from meshrunner.runner.sweep.rounds import execute_further_rounds

Ended = Callable[[int], object]
"""Callback that receives the exit status of a batch after its runs have ended."""


class StopSweep(Exception):
    """Exception that stops the sweeper before the next batch, because of `sweep.fail_fast` or a stop request."""


MAXIMIZE = {
    "hydra.sweeper.direction": "maximize",
    "hydra.sweeper.optim.maximize": "true",
    "hydra.sweeper.ax_config.experiment.minimize": "false",
}
"""Keys that set the direction of the Optuna, Nevergrad and Ax sweepers, each with the value that maximizes the objective."""


def minimizes(config: DictConfig) -> bool:
    """Return whether the sweeper is adaptive (Optuna, Nevergrad or Ax) and minimizes the objective."""
    direction, maximize, minimize = (OmegaConf.select(config, key) for key in MAXIMIZE)
    return getattr(direction, "name", direction) == "minimize" or maximize is False or minimize is True


def check_direction(config: DictConfig) -> None:
    """Raise ConfigError if a sweeper minimizes an objective that should be maximized, unless the user has set the direction."""
    objective, given = str(config.get("objective")), " ".join(typed(config.hydra.overrides.hydra))
    if minimizes(config) and higher_is_better(objective) and not any(key in given for key in MAXIMIZE):
        key = next(key for key in MAXIMIZE if OmegaConf.select(config, key) is not None)
        raise ConfigError(f"hydra.sweeper minimizes, but a higher {objective} is better. Add {key}={MAXIMIZE[key]}")


def run_sweep(composer: Composer, config: DictConfig | None = None, jobs: Jobs | None = None) -> int:
    """Run a sweep from the command line. Return 75 if a stop was requested, else 1 if any run has no result, else 0.

    `config`: the result of `composer.compose_sweep()`, or None to call this method here. `jobs`: overrides of the combinations
    to run, or None if the sweeper chooses the combinations.
    """
    statuses: list[int] = []  # reported by the launcher for each batch, because some sweepers return nothing
    config = config or composer.compose_sweep()
    check_direction(config)
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    record("folder", sweep_dir)
    try:
        with _restored_unless_placed(sweep_dir), suppress(StopSweep):
            composer.sweep(config, statuses.append, jobs)
            if statuses and config.hydra.sweeper._target_ != TUNE_SWEEPER:
                statuses.append(execute_further_rounds(sweep_dir))
    except MissingConfigException:
        raise  # MissingConfigException is an OSError, but not a write error
    except OSError as error:
        raise ConfigError(f"hydra.sweep.dir: the sweep directory cannot be written: {error}") from None
    except Exception:  # an adaptive sweeper may launch an invalid job after hours of successful runs
        if statuses:
            finish_sweep(sweep_dir)
        raise
    if statuses:
        finish_sweep(sweep_dir)
    return max(statuses, default=0)


@contextmanager
def _restored_unless_placed(sweep_dir: Path) -> Iterator[None]:
    """Undo Hydra's changes to the sweep directory, unless the sweep has written runs or a search by `tune` has begun."""
    record, placed = sweep_dir / MULTIRUN, sweep_dir / SWEEP
    before = record.read_bytes() if record.is_file() else None
    since = placed.stat().st_mtime_ns if placed.exists() else None
    created = [folder for folder in (sweep_dir, *sweep_dir.parents) if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # the directory is not empty or was removed
            if not (sweep_dir / TUNE).exists() and since == (placed.stat().st_mtime_ns if placed.exists() else None):
                if before is None:
                    record.unlink(missing_ok=True)
                else:
                    record.write_bytes(before)
                for folder in created:
                    folder.rmdir()


def resume_sweep(sweep_dir: Path) -> int:
    """Execute the unfinished runs of a sweep directory. Return the exit status. If a run is damaged, the status is nonzero."""
    if (sweep_dir / TUNE).exists():
        return run_sweep(composer_of(sweep_dir))
    run_dirs, first, damaged = usable_runs(sweep_dir, run_names(sweep_dir))
    say(f"sweep directory: {shown(sweep_dir)}")
    for run_dir in run_dirs:
        if read_state(run_dir) not in RESULTS:
            workers_of_sweep(check(read_config(run_dir)))
    status, stop = execute_all(run_dirs, first)
    if not stop:
        status = max(status, execute_further_rounds(sweep_dir))
    finish_sweep(sweep_dir)
    return status or int(damaged > 0)


def composer_of(sweep_dir: Path, launcher: Sequence[str] = ()) -> Composer:
    """Return a composer for the command line that multirun.yaml records. `launcher`: overrides of hydra/launcher and
    hydra.launcher. If `launcher` is empty, this machine executes the runs, for example in the SLURM job of a search."""
    try:
        written = OmegaConf.load(sweep_dir / MULTIRUN)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{sweep_dir / MULTIRUN} cannot be read: {error}") from None
    hydra = written.hydra
    own = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    overrides = [*typed(hydra.overrides.hydra), *typed(hydra.overrides.task)]
    left_out = re.compile(r"hydra\.(mode|sweep\.dir)|hydra/launcher" + r"|hydra\.launcher\..+" * (not launcher))
    kept = [*(each for each in overrides if not left_out.fullmatch(key_of(each))), *launcher]
    here = QuotedString(str(sweep_dir), Quote.single).with_quotes()
    directories = [word for each in own for word in ("--config-dir", each)]
    return Composer("resume", ["-m", *directories, *kept, f"hydra.sweep.dir={here}"])


def launch_local(loader: Any, config: DictConfig, job_overrides: Jobs, first: int, ended: Ended) -> list[JobReturn]:
    """Execute a batch of jobs on this node. Raise ConfigError if any job is invalid, or StopSweep if the sweep must stop."""
    target = Target(workers_of_sweep)
    batch = with_predictions(check_batch(loader, config, job_overrides, first, target), target)
    if first == 0:
        say(f"sweep directory: {shown(batch.sweep_dir)}")
    status, stop = execute_all(batch.place(), batch.combinations[0].experiment)
    ended(status)
    if stop:
        raise StopSweep
    return _job_returns(batch, config)


def launch_slurm(loader: Any, config: DictConfig, job_overrides: Jobs, first: int, ended: Ended) -> list[JobReturn]:
    """Submit the runs of a batch, and the sweep's earlier unfinished runs, to SLURM. Raise ConfigError if any job is invalid."""
    settings = Slurm.read(plain(config.hydra.launcher))
    if not settings.wait and not settings.dry_run and config.hydra.sweeper._target_ != BASIC_SWEEPER:
        raise ConfigError(
            "hydra.launcher.wait: this sweeper needs the results of each batch; use hydra.launcher.wait=true"
        )
    target = Target(settings.workers, settings.apply_to, here=False)
    batch = with_predictions(check_batch(loader, config, job_overrides, first, target), target)
    if any(job.experiment.sweep.repeat == "auto" for job in batch.combinations):
        raise ConfigError("sweep.repeat=auto needs the results of each round; with SLURM, set sweep.repeat to a number")
    # Compute the order of runs.txt instead of reading this file, because a dry run does not write it.
    names = list(dict.fromkeys([*run_names(batch.sweep_dir), *(run.run_dir.name for _, run in batch.ordered)]))
    earlier = _earlier_runs(batch) if first == 0 else []
    if not settings.dry_run:
        batch.place()
    runs = {run.run_dir: job.experiment for job, run in batch.ordered if not job.reason}
    todo = to_submit([*earlier, *runs], batch.combinations[0].experiment.sweep.rerun, quiet=settings.dry_run)
    experiments = {run_dir: runs.get(run_dir) or check(read_config(run_dir)) for run_dir in todo}
    plans = {run.run_dir: job.plan for job, run in batch.ordered}
    submit_runs(batch.sweep_dir, experiments, settings, names, plans)
    if settings.dry_run or not settings.wait:
        return []
    ended(wait([run.run_dir for _, run in batch.ordered]))
    return _job_returns(batch, config)


def _earlier_runs(batch: SweepBatch) -> list[Path]:
    """Return the undamaged runs that earlier commands wrote to the sweep directory, except the runs of this batch."""
    own = {run.run_dir.name for _, run in batch.ordered}
    names = [name for name in run_names(batch.sweep_dir) if name not in own]
    try:
        return usable_runs(batch.sweep_dir, names).run_dirs if names else []
    except ConfigError as error:  # if no earlier run is executable, the new runs still start
        warn(str(error))
        return []


def launch_place(loader: Any, config: DictConfig, job_overrides: Jobs, first: int) -> list[JobReturn]:
    """Write the run directories of a batch for `meshrunner place -m`. Raise ConfigError if any job is invalid."""
    target = Target(configured_workers)
    batch = with_predictions(check_batch(loader, config, job_overrides, first, target), target)
    batch.place()
    say(f"sweep directory: {batch.sweep_dir}")
    return []


def _job_returns(batch: SweepBatch, config: DictConfig) -> list[JobReturn]:
    """Return each job's objective: the median over its runs. If a run is incomplete or has no value, the objective is the worst
    value, which is infinity or its negative."""
    worst = math.inf if minimizes(config) else -math.inf
    returns = []
    for job in batch.combinations:
        values = []
        for run in job.runs:
            summary = Summary.read(run.run_dir / SUMMARY)
            value = summary.figures.get(job.experiment.objective)
            values.append(worst if value is None or summary.state != "completed" else value)
        result = JobReturn(
            overrides=job.overrides,
            cfg=OmegaConf.create(job.runs[0].config),
            hydra_cfg=job.hydra,
            working_dir=str(job.runs[0].run_dir),
            task_name="meshrunner",
        )
        result.status, result.return_value = JobStatus.COMPLETED, median(values) if worst not in values else worst
        returns.append(result)
    return returns

"""Turns the jobs of a Hydra sweeper into run directories. All jobs of a batch are checked before any directory is written.

A job is a combination of the overrides that a sweep varies. A combination has a run for each repeat and seed. A batch is all
jobs that the sweeper passes to a launcher at once. By default, a grid forms one batch. Adaptive sweepers pass several batches.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.compare.best import by
from meshrunner.runner.compare.comparison import check_baseline, compare_runs
from meshrunner.runner.compare.keys import first_of
from meshrunner.runner.compare.noise import REPEATS
from meshrunner.runner.compare.runs import EXCLUDED, Run
from meshrunner.runner.config.compose import Composed, resolve_config, typed
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment, Sweep, check
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.config.hydra.hydra_errors import explain, missing_key
from meshrunner.runner.config.hydra.overrides import as_typed
from meshrunner.runner.config.hydra.private import GRID_SWEEPERS
from meshrunner.runner.config.resumable import check_existing, fit_continuing
from meshrunner.runner.console import naming
from meshrunner.runner.rundir import PlanRecord, add_runs, place_run, read_state, repeat_ending, update_status
from meshrunner.runner.rundir.files import PLAN, is_run
from meshrunner.runner.sweep.exclude import check_rules, matching_rule

NAME_LENGTH = 100
MAX_LISTED = 5
"""Maximum number of problems that an error message lists. For each problem, the message names at most MAX_LISTED jobs."""
Jobs = Sequence[Sequence[str]]
"""The overrides of each job of a batch."""


@dataclass(frozen=True)
class Target:
    """The machine or cluster that will execute the runs."""

    workers: Callable[[Experiment], int]
    """Function that returns a run's number of workers per node. It resolves `auto`. May raise Incompatible or ConfigError."""
    apply_to: Callable[[Composed], Composed] = lambda composed: composed
    """Function that adds the target's settings, such as the number of SLURM nodes, to a configuration. May raise ConfigError."""
    here: bool = True
    """Whether `hardware=auto` means the devices of this machine instead of the devices of a cluster."""


def configured_workers(experiment: Experiment) -> int:
    """Return launch.workers. If it is `auto`, return the number of devices per node, even if this machine lacks the devices."""
    if experiment.launch.workers != "auto":
        return experiment.launch.workers
    hardware = experiment.hardware
    return hardware.devices_per_node if isinstance(hardware, GPU) else node_devices(experiment).workers


@dataclass(frozen=True)
class Combination:
    """A combination of the overrides that a sweep varies, with a run per repeat and seed. Run directories need not exist."""

    overrides: list[str]
    hydra: DictConfig
    experiment: Experiment
    runs: list[Composed]
    """Configurations of the runs: all seeds of the first repeat, then all seeds of the second repeat, ..."""
    reason: str
    """Reason why the sweep skips the runs; empty if the sweep executes the runs."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Content of plan.json, the predicted memory and speed; {} without a prediction."""


@dataclass(frozen=True)
class SweepBatch:
    """A batch of combinations that have been checked."""

    sweep_dir: Path
    combinations: list[Combination]

    @property
    def ordered(self) -> list[tuple[Combination, Composed]]:
        """Runs in execution order. Each round runs every combination once, so drift in speed affects all of them equally."""
        rounds = [*map(list, zip(*([(job, run) for run in job.runs] for job in self.combinations), strict=True))]
        first = self.combinations[0].experiment
        if len(rounds) > 1 and first.sweep.order == "shuffled":
            generator = random.Random(first.seed)
            for pairs in rounds:
                generator.shuffle(pairs)
        return [pair for pairs in rounds for pair in pairs]

    def place(self) -> list[Path]:
        """Write the run directories and return them in order of execution."""
        with naming(f"writing {len(self.ordered):,} run directories"):
            for job, run in self.ordered:
                _place(job, run)
        add_runs(self.sweep_dir, [(run.run_dir.name, as_typed(job.overrides)) for job, run in self.ordered])
        return [run.run_dir for _, run in self.ordered]


def check_batch(loader: Any, config: DictConfig, job_overrides: Jobs, first: int, target: Target) -> SweepBatch:
    """Compose and check a batch of jobs. If any jobs are invalid, raise a ConfigError that lists up to MAX_LISTED problems."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    jobs: list[Combination] = []
    wrong: dict[str, list[str]] = {}
    missing: list[str] = []
    varied = varying(job_overrides) - set(typed(config.hydra.overrides.task))
    with naming(f"composing and checking {len(job_overrides):,} combinations"):
        for number, overrides in enumerate(job_overrides, first):
            named = [override for override in overrides if override in varied]
            try:
                job = _compose_job(loader, config, list(overrides), number, sweep_dir / job_name(number, named), target)
                for run in job.runs:
                    check_existing(run.run_dir, run.config)
                jobs.append(job)
            except (ConfigError, HydraException, OmegaConfBaseException) as error:
                problem = str(error)
                if not isinstance(error, ConfigError):
                    problem = explain(error, list(overrides))
                    missing.append(missing_key(error))
                    if len(missing) == len(job_overrides) and len(set(missing)) == 1:  # all jobs lack the same key
                        raise
                wrong.setdefault(problem, []).append(f"job {number} ({' '.join(named)})")
    if wrong:
        listed = [f"{first_of(names, MAX_LISTED)}: {problem}" for problem, names in list(wrong.items())[:MAX_LISTED]]
        more = [f"... and {len(wrong) - MAX_LISTED} more problems"] * (len(wrong) > MAX_LISTED)
        raise ConfigError("\n".join(listed + more))
    sweeper = config.hydra.sweeper
    if sweeper._target_ in GRID_SWEEPERS and sweeper.get("max_batch_size") is None:  # no other batch follows
        given = typed(config.hydra.overrides.hydra)  # the overrides may add config directories
        options = partial(loader.get_group_options, config_name=config.hydra.job.config_name, overrides=given)
        rules = dict.fromkeys(rule for job in jobs for rule in job.experiment.sweep.exclude)
        check_rules(rules, [job.runs[0] for job in jobs], options)
        if (baseline := jobs[0].experiment.sweep.baseline) is not None:
            check_baseline(baseline, [pending(job.runs[0]) for job in jobs])
        if jobs[0].experiment.sweep.best_by:
            by(compare_runs([pending(job.runs[0]) for job in jobs]))  # raises ConfigError if a key is unknown
    return SweepBatch(sweep_dir, jobs)


def pending(composed: Composed) -> Run:
    """Represent a configuration as a pending run. The run's directory need not exist."""
    choices, task = composed.overrides["choices"], composed.overrides["task"]
    return Run(composed.run_dir, "pending", config=composed.config, choices=choices, task=task)


def _compose_job(
    loader: Any, config: DictConfig, overrides: list[str], number: int, run_dir: Path, target: Target
) -> Combination:
    composed_config = loader.load_sweep_config(config, overrides)
    with open_dict(composed_config):
        composed_config.hydra.job.id, composed_config.hydra.job.num = str(number), number
    composed = target.apply_to(resolve_config(composed_config, run_dir))
    hydra = OmegaConf.masked_copy(composed_config, ["hydra"])
    experiment, reason = check(composed.config), ""
    try:
        if rule := matching_rule(experiment.sweep.exclude, composed):
            raise Incompatible(f"{EXCLUDED}{rule}")
        fit_continuing(experiment, run_dir, target.workers(experiment))
    except Incompatible as error:
        reason = str(error)
    return Combination(overrides, hydra, experiment, _repeated(composed, experiment.sweep), reason)


def _repeated(composed: Composed, sweep: Sweep) -> list[Composed]:
    runs = []
    repeats = REPEATS if sweep.repeat == "auto" else sweep.repeat
    for repeat in range(1, repeats + 1):
        for seed in range(composed.config["seed"], composed.config["seed"] + sweep.seeds):
            ending = repeat_ending(seed if sweep.seeds > 1 else None, repeat if repeats > 1 else None)
            run_dir = composed.run_dir.with_name(composed.run_dir.name + ending)
            runs.append(replace(composed, config=composed.config | {"seed": seed}, run_dir=run_dir))
    return runs


def _place(job: Combination, run: Composed) -> None:
    if not is_run(run.run_dir):
        place_run(run.config, run.run_dir, run.overrides, job.plan)
    elif job.plan:
        PlanRecord.model_validate(job.plan).write(run.run_dir / PLAN)
    state = read_state(run.run_dir)
    if job.reason and state == "pending":
        update_status(run.run_dir, state="skipped", reason=job.reason)
    elif state == "skipped" and not job.reason:
        update_status(run.run_dir, state="pending", reason="")


def varying(job_overrides: Jobs) -> set[str]:
    """Return the overrides that only some jobs have. For a single job, return all: sweepers may pass single jobs."""
    sets = [set(overrides) for overrides in job_overrides]
    shared = set.intersection(*sets) if len(sets) > 1 else set()
    return set.union(*sets) - shared


def job_name(number: int, overrides: list[str]) -> str:
    """Return a job's directory name, such as `003_parallelism-fsdp2_shard-2`. Cut a long name to NAME_LENGTH and add a hash."""
    parts = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        parts.append(f"{key.rpartition('.')[2]}-{value}")
    name = "_".join([f"{number:03}", *(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-") for part in parts)])
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[:NAME_LENGTH]}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"

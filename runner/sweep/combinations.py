"""Turns the jobs of a Hydra sweeper into run directories. All jobs are composed and checked before any is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from meshrunner.recipes.config_diff import differences
from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.config.compose import Composed, resolve_config, typed
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment, Sweep, check
from meshrunner.runner.config.from_checkpoint import fit_continuing
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.config.hydra.hydra_errors import explain, missing_key
from meshrunner.runner.config.hydra.overrides import MAX_RUNS, as_typed
from meshrunner.runner.config.hydra.private import BASIC_SWEEPER
from meshrunner.runner.console import naming, warn
from meshrunner.runner.launch.nodes import only_this_node
from meshrunner.runner.rundir import PlanRecord, add_runs, place_run, read_config, read_state, run_names, update_status
from meshrunner.runner.rundir.files import PLAN, is_run
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.sweep.exclude import check_rules, matching_rule
from meshrunner.runner.sweep.missing_keys import advice

NAME_LENGTH = 100
MAX_LISTED = 5
"""Most problems listed in an error, and most jobs named per problem."""


class ConfiguredTarget:
    """The hardware that the configuration describes, for runs that another machine executes."""

    def apply_to(self, composed: Composed) -> Composed:
        """Return the configuration with settings that this target requires; raises ConfigError."""
        return composed

    def workers(self, experiment: Experiment) -> int:
        """Return the workers per node, with `auto` resolved; raises Incompatible or ConfigError."""
        if experiment.launch.workers != "auto":
            return experiment.launch.workers
        hardware = experiment.hardware
        return hardware.devices_per_node if isinstance(hardware, GPU) else node_devices(experiment).workers


class LocalTarget(ConfiguredTarget):
    """This machine as the only node."""

    def workers(self, experiment: Experiment) -> int:
        only_this_node(experiment.launch.nodes)
        return node_devices(experiment).workers


Target = ConfiguredTarget | Slurm
"""Machine or cluster that will execute the runs."""


@dataclass(frozen=True)
class PlannedRun:
    """A run whose directory is not written yet."""

    composed: Composed
    reason: str
    """Why the run is skipped; empty if it can run."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Content of plan.json; {} without a prediction."""

    @property
    def run_dir(self) -> Path:
        return self.composed.run_dir


@dataclass(frozen=True)
class Combination:
    """One combination of a sweep, with a run for each repeat and seed."""

    overrides: list[str]
    hydra: DictConfig
    experiment: Experiment
    runs: list[PlannedRun]
    """Runs ordered by repeat, then by seed."""


@dataclass(frozen=True)
class SweepBatch:
    """A batch of valid combinations from a sweeper."""

    sweep_dir: Path
    combinations: list[Combination]

    @property
    def ordered(self) -> list[tuple[Combination, PlannedRun]]:
        """Runs in order of execution. Repeats are interleaved so that a drifting machine affects all combinations alike."""
        rounds = zip(*([(job, run) for run in job.runs] for job in self.combinations), strict=True)
        return [pair for pairs in rounds for pair in pairs]

    def names(self) -> list[str]:
        """Return the names of all run directories of the sweep in order, including earlier batches."""
        return list(dict.fromkeys([*run_names(self.sweep_dir), *(run.run_dir.name for _, run in self.ordered)]))

    def place(self) -> list[Path]:
        """Write the run directories and return them in order of execution."""
        with naming(f"writing {len(self.ordered):,} run directories"):
            for _, run in self.ordered:
                _place(run)
        add_runs(self.sweep_dir, [(run.run_dir.name, as_typed(job.overrides)) for job, run in self.ordered])
        return [run.run_dir for _, run in self.ordered]


def check_batch(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, target: Target
) -> SweepBatch:
    """Compose and check a batch of jobs; raises ConfigError that lists all invalid ones."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    jobs: list[Combination] = []
    wrong: dict[str, list[str]] = {}
    without_key: dict[str, list[Sequence[str]]] = {}
    runs = not_composed = 0
    varied = varying(job_overrides) - set(typed(config.hydra.overrides.task))
    with naming(f"composing and checking {len(job_overrides):,} combinations"):
        for number, overrides in enumerate(job_overrides, first):
            named = [override for override in overrides if override in varied]
            try:
                job = _compose_job(loader, config, list(overrides), number, sweep_dir / job_name(number, named), target)
                if (runs := len(job.runs) * len(job_overrides)) > MAX_RUNS:
                    break
                for run in job.runs:
                    _check_existing(run)
                jobs.append(job)
            except (ConfigError, HydraException, OmegaConfBaseException) as error:
                problem = str(error)
                if not isinstance(error, ConfigError):
                    problem, not_composed = explain(error, list(overrides)), not_composed + 1
                    if key := missing_key(error):
                        without_key.setdefault(key, []).append(overrides)
                    if not_composed == len(job_overrides) and len(without_key) < 2:  # the cause is not what varies
                        raise
                wrong.setdefault(problem, []).append(f"job {number} ({' '.join(named)})")
    if runs > MAX_RUNS:
        raise ConfigError(f"sweep.repeat x sweep.seeds: {runs:,} runs, but a sweep may have at most {MAX_RUNS:,}")
    if wrong:
        raise ConfigError("\n".join([*_wrong_jobs(wrong), *advice(without_key, job_overrides)]))
    if any(job.hydra.hydra.sweeper != config.hydra.sweeper for job in jobs):
        warn("hydra.sweeper has no effect inside an option that is swept over. Give the grid on the command line.")
    _check_exclude(loader, config, jobs)
    return SweepBatch(sweep_dir, jobs)


def _check_exclude(loader: Any, config: DictConfig, jobs: Sequence[Combination]) -> None:
    """Check the rules of `sweep.exclude` against a batch; warn of rules that match nothing."""
    rules = list(dict.fromkeys(rule for job in jobs for rule in job.experiment.sweep.exclude))
    if not rules:
        return

    def options(group: str) -> list[str]:
        given = typed(config.hydra.overrides.hydra)  # may add config directories
        return list(loader.get_group_options(group, config_name=config.hydra.job.config_name, overrides=given))

    sweeper = config.hydra.sweeper
    whole = sweeper._target_ == BASIC_SWEEPER and sweeper.get("max_batch_size") is None
    for remark in check_rules(rules, [job.runs[0].composed for job in jobs], options, whole_sweep=whole):
        warn(remark)


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
            raise Incompatible(f"sweep.exclude: {rule}")
        fit_continuing(experiment, run_dir, target.workers(experiment))
    except Incompatible as error:
        reason = str(error)
    return Combination(overrides, hydra, experiment, _repeated(composed, run_dir, reason, experiment.sweep))


def _repeated(composed: Composed, run_dir: Path, reason: str, sweep: Sweep) -> list[PlannedRun]:
    runs = []
    for repeat in range(1, sweep.repeat + 1):
        for seed in range(composed.config["seed"], composed.config["seed"] + sweep.seeds):
            name = run_dir.name
            name += f"_seed-{seed}" if sweep.seeds > 1 else ""
            name += f"_repeat-{repeat}" if sweep.repeat > 1 else ""
            own = replace(composed, config=composed.config | {"seed": seed}, run_dir=run_dir.with_name(name))
            runs.append(PlannedRun(own, reason))
    return runs


def _check_existing(run: PlannedRun) -> None:
    """Raise ConfigError if an earlier start of the sweep wrote the run directory with another configuration."""
    if not is_run(run.run_dir):
        return
    different = differences(read_config(run.run_dir), run.composed.config)
    changed = [
        f"  {key}: {old!r} on disk, {new!r} now" for key, old, new in different if key.partition(".")[0] != "sweep"
    ]
    if changed:
        problem = f"{run.run_dir} holds a run with another configuration. Choose another hydra.sweep.dir. Differences:"
        raise ConfigError("\n".join([problem, *changed]))


def _place(run: PlannedRun) -> None:
    if not is_run(run.run_dir):
        place_run(run.composed.config, run.run_dir, run.composed.overrides, run.plan)
    elif run.plan:
        PlanRecord.model_validate(run.plan).write(run.run_dir / PLAN)
    state = read_state(run.run_dir)
    if run.reason and state == "pending":
        update_status(run.run_dir, state="skipped", reason=run.reason)
    elif state == "skipped" and not run.reason:
        update_status(run.run_dir, state="pending", reason="")


def _wrong_jobs(wrong: dict[str, list[str]]) -> Iterator[str]:
    """Yield one line per problem, with the jobs that have it."""
    for problem, names in list(wrong.items())[:MAX_LISTED]:
        more = f" and {len(names) - MAX_LISTED} more jobs" if len(names) > MAX_LISTED else ""
        yield f"{', '.join(names[:MAX_LISTED])}{more}: {problem}"
    if len(wrong) > MAX_LISTED:
        yield f"... and {len(wrong) - MAX_LISTED} more problems"


def varying(job_overrides: Sequence[Sequence[str]]) -> set[str]:
    """Return the overrides that not all jobs share, or all overrides of a single job: a sweeper may pass jobs one by one."""
    sets = [set(overrides) for overrides in job_overrides]
    shared = set.intersection(*sets) if len(sets) > 1 else set()
    return set.union(*sets) - shared


def job_name(number: int, overrides: list[str]) -> str:
    """Return a directory name such as `003_parallelism-fsdp2_shard-2`, cut at NAME_LENGTH characters with a hash appended."""
    parts = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        parts.append(f"{key.rpartition('.')[2]}-{value}")
    name = "_".join([f"{number:03}", *(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-") for part in parts)])
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[:NAME_LENGTH]}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"

"""Jobs of a sweeper -> run directories: all are composed and checked before the first is placed."""

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
from meshrunner.runner.sweep.lacking import advice

NAME_LENGTH = 100
MAX_LISTED = 5
"""Problems listed in an error, and jobs per problem."""


class ConfiguredTarget:
    """The hardware that the configuration names; this machine may have no GPU."""

    def apply_to(self, composed: Composed) -> Composed:
        """Return the configuration with the target's own settings applied; raises ConfigError."""
        return composed

    def workers(self, experiment: Experiment) -> int:
        """Workers per node, `auto` resolved; raises Incompatible or ConfigError."""
        if experiment.launch.workers != "auto":
            return experiment.launch.workers
        hardware = experiment.hardware
        return hardware.devices_per_node if isinstance(hardware, GPU) else node_devices(experiment).workers


class LocalTarget(ConfiguredTarget):
    """This machine, alone."""

    def workers(self, experiment: Experiment) -> int:
        only_this_node(experiment.launch.nodes)
        return node_devices(experiment).workers


Target = ConfiguredTarget | Slurm
"""The place where runs will be executed."""


@dataclass(frozen=True)
class PlannedRun:
    """A run that is not placed yet."""

    composed: Composed
    reason: str
    """Why it would be skipped; empty if it can run."""
    plan: dict[str, Any] = field(default_factory=dict)
    """What is predicted of it; {} for nothing."""

    @property
    def run_dir(self) -> Path:
        return self.composed.run_dir


@dataclass(frozen=True)
class Combination:
    """One combination of a sweep: a run, or several repeats and seeds of it."""

    overrides: list[str]
    hydra: DictConfig
    experiment: Experiment
    runs: list[PlannedRun]
    """Runs in the order of `sweep.repeat` x `sweep.seeds`."""


@dataclass(frozen=True)
class SweepBatch:
    """A batch of combinations from a sweeper, each with a valid configuration."""

    sweep_dir: Path
    combinations: list[Combination]

    @property
    def ordered(self) -> list[tuple[Combination, PlannedRun]]:
        """Runs in order of execution, repeats interleaved: a drifting machine then affects all combinations alike."""
        rounds = zip(*([(job, run) for run in job.runs] for job in self.combinations), strict=True)
        return [pair for pairs in rounds for pair in pairs]

    def names(self) -> list[str]:
        """Names of all run directories of the sweep in order, earlier batches included."""
        return list(dict.fromkeys([*run_names(self.sweep_dir), *(run.run_dir.name for _, run in self.ordered)]))

    def place(self) -> list[Path]:
        """Write the run directories; returns them in order of execution."""
        with naming(f"writing {len(self.ordered):,} run directories"):
            for _, run in self.ordered:
                _place(run)
        add_runs(self.sweep_dir, [(run.run_dir.name, as_typed(job.overrides)) for job, run in self.ordered])
        return [run.run_dir for _, run in self.ordered]


def check_batch(
    loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, target: Target
) -> SweepBatch:
    """Compose and check a batch of jobs; raises ConfigError that lists all wrong ones."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    jobs: list[Combination] = []
    wrong: dict[str, list[str]] = {}
    lacking: dict[str, list[Sequence[str]]] = {}
    runs = not_composed = 0
    varying = _varying(job_overrides) - set(typed(config.hydra.overrides.task))
    with naming(f"composing and checking {len(job_overrides):,} combinations"):
        for number, overrides in enumerate(job_overrides, first):
            named = [override for override in overrides if override in varying]
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
                        lacking.setdefault(key, []).append(overrides)
                    if not_composed == len(job_overrides) and len(lacking) < 2:  # it is not a matter of what varies
                        raise
                wrong.setdefault(problem, []).append(f"job {number} ({' '.join(named)})")
    if runs > MAX_RUNS:
        raise ConfigError(f"sweep.repeat x sweep.seeds: {runs:,} runs; a sweep has at most {MAX_RUNS:,}")
    if wrong:
        raise ConfigError("\n".join([*_wrong_jobs(wrong), *advice(lacking, job_overrides)]))
    if any(job.hydra.hydra.sweeper != config.hydra.sweeper for job in jobs):
        warn("hydra.sweeper has no effect in what is itself swept over: give the grid on the command line")
    _check_exclude(loader, config, jobs)
    return SweepBatch(sweep_dir, jobs)


def _check_exclude(loader: Any, config: DictConfig, jobs: Sequence[Combination]) -> None:
    """Check the rules of `sweep.exclude` against a batch, and remark on those that match nothing."""
    rules = list(dict.fromkeys(rule for job in jobs for rule in job.experiment.sweep.exclude))
    if not rules:
        return

    def options(group: str) -> list[str]:
        given = typed(config.hydra.overrides.hydra)  # may add folders to search
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
    """Raise ConfigError when the run directory exists, from an earlier start of the sweep, with another configuration."""
    if not is_run(run.run_dir):
        return
    different = differences(read_config(run.run_dir), run.composed.config)
    own = [each for each in different if each[0].partition(".")[0] != "sweep"]
    if changed := [f"  {key}: {old!r} there, {new!r} now" for key, old, new in own]:
        raise ConfigError("\n".join([f"{run.run_dir} holds another run; choose another hydra.sweep.dir:", *changed]))


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
    """One line per problem, with the jobs that have it."""
    for problem, names in list(wrong.items())[:MAX_LISTED]:
        more = f" and {len(names) - MAX_LISTED} more jobs" if len(names) > MAX_LISTED else ""
        yield f"{', '.join(names[:MAX_LISTED])}{more}: {problem}"
    if len(wrong) > MAX_LISTED:
        yield f"... and {len(wrong) - MAX_LISTED} more problems"


def _varying(job_overrides: Sequence[Sequence[str]]) -> set[str]:
    """The overrides that are not shared by all jobs; all overrides of a single job, as a sweeper may pass jobs one by one."""
    sets = [set(overrides) for overrides in job_overrides]
    shared = set.intersection(*sets) if len(sets) > 1 else set()
    return set.union(*sets) - shared


def job_name(number: int, overrides: list[str]) -> str:
    """`003_parallelism-fsdp2_shard-2`: number and varying overrides; beyond NAME_LENGTH characters cut, with a hash."""
    parts = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        parts.append(f"{key.rpartition('.')[2]}-{value}")
    name = "_".join([f"{number:03}", *(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-") for part in parts)])
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[:NAME_LENGTH]}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"

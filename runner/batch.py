"""The jobs that a sweeper hands over -> run directories: all are composed and checked before the first is placed."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.checkpoint.stored import differences
from recipes.option import ConfigError, Incompatible
from runner.compose import Composed, split
from runner.devices import resolve
from runner.exclude import excluding
from runner.experiment import check
from runner.hardware import GPU
from runner.nodes import only_this_node
from runner.resume import fit_continuing
from runner.rundir import place, read_config, read_json, read_status, update_status, write_json

if TYPE_CHECKING:
    from runner.experiment import Experiment, Sweep

NAME_LENGTH = 100
SHOWN = 5
"""Problems, and jobs of a problem, that are listed."""
RUNS = "runs.txt"
"""The run directories of a sweep, one a line, in the order of sweep.json: what a SLURM array counts."""


class Site(Protocol):
    """Where the runs will be executed."""

    def adapt(self, composed: Composed) -> Composed:
        """A configuration as it is there; raises ConfigError."""

    def workers(self, experiment: Experiment) -> int:
        """Workers on a node, `auto` resolved; raises Incompatible or ConfigError."""


class Elsewhere:
    """The machine that the configuration names; this one may have no GPU."""

    def adapt(self, composed: Composed) -> Composed:
        return composed

    def workers(self, experiment: Experiment) -> int:
        if experiment.launch.workers != "auto":
            return experiment.launch.workers
        hardware = experiment.hardware
        return hardware.devices_per_node if isinstance(hardware, GPU) else resolve(experiment)[1]


class Here(Elsewhere):
    """This machine, alone."""

    def workers(self, experiment: Experiment) -> int:
        only_this_node(experiment.launch.nodes)
        return resolve(experiment)[1]


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
    """Jobs that are right, each by itself."""

    sweep_dir: Path
    jobs: list[Job]

    @property
    def ordered(self) -> list[tuple[Job, Run]]:
        """Repeats are interleaved: what drifts on a machine meets every combination alike."""
        return [
            pair for one in zip(*([(job, run) for run in job.runs] for job in self.jobs), strict=True) for pair in one
        ]

    def names(self) -> list[str]:
        """Of all runs of the sweep in order, those placed earlier included."""
        known = [str(job["name"]) for job in read_json(self.sweep_dir / "sweep.json").get("jobs", [])]
        return list(dict.fromkeys([*known, *(run.run_dir.name for _, run in self.ordered)]))

    def place(self) -> list[Path]:
        """Write the run directories; returns them in the order in which they are to be executed."""
        for _, run in self.ordered:
            _place(run)
        # Sweepers that decide as they go hand over batch by batch; a sweep that is taken up has its jobs already.
        names, path = self.names(), self.sweep_dir / "sweep.json"
        known = read_json(path).get("jobs", [])
        added = [{"name": run.run_dir.name, "overrides": job.overrides} for job, run in self.ordered]
        write_json(path, {"command": sys.argv, "jobs": known + [job for job in added if job not in known]})
        (self.sweep_dir / RUNS).write_text("".join(f"{name}\n" for name in names))
        return [run.run_dir for _, run in self.ordered]


def checked(loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, site: Site) -> Batch:
    """Compose and check what a sweeper hands over; raises ConfigError that lists all jobs that are wrong."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    jobs: list[Job] = []
    wrong: dict[str, list[str]] = {}
    varying = _varying(job_overrides) - set(config.hydra.overrides.task)
    for number, overrides in enumerate(job_overrides, first):
        own = [override for override in overrides if override in varying]
        try:
            job = _compose_job(loader, config, list(overrides), number, sweep_dir / job_name(number, own), site)
            for run in job.runs:
                _check_place(run)
            jobs.append(job)
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(f"job {number} ({' '.join(own)})")
    if wrong:
        remove_empty(sweep_dir)
        raise ConfigError("\n".join(_wrong_jobs(wrong)))
    return Batch(sweep_dir, jobs)


def _compose_job(loader: Any, config: DictConfig, overrides: list[str], number: int, run_dir: Path, site: Site) -> Job:
    composed_config = loader.load_sweep_config(config, overrides)
    with open_dict(composed_config):
        composed_config.hydra.job.id, composed_config.hydra.job.num = str(number), number
    composed = site.adapt(split(composed_config, run_dir))
    hydra = OmegaConf.masked_copy(composed_config, ["hydra"])
    experiment, reason = check(composed.config), ""
    try:
        if rule := excluding(experiment.sweep.exclude, composed):
            raise Incompatible(f"sweep.exclude: {rule}")
        fit_continuing(experiment, run_dir, site.workers(experiment))
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


def remove_empty(sweep_dir: Path) -> None:
    """Hydra's sweeper has made the folder and a file in it; of a sweep that was refused nothing is to be left."""
    if {path.name for path in sweep_dir.iterdir()} != {"multirun.yaml"}:
        return
    (sweep_dir / "multirun.yaml").unlink()
    for folder in (sweep_dir, *sweep_dir.parents):
        if folder == Path.cwd() or any(folder.iterdir()):
            return
        folder.rmdir()


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

"""The local launcher: every job of a sweep is checked and placed on disk first, then they run one after another."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.option import ConfigError, Incompatible
from runner.compose import Composed, split
from runner.devices import resolve
from runner.exclude import excluding
from runner.execute import execute
from runner.experiment import Experiment, check
from runner.report import report
from runner.resume import fit_continuing
from runner.rundir import place, read_status, update_status, write_json

if TYPE_CHECKING:
    from runner.compose import Composer

FAILED = frozenset({"failed", "timeout", "oom"})
WORST = float("-inf")
"""What a sweeper is told of a run without a result."""
NAME_LENGTH = 100
SHOWN = 5
"""Problems, and jobs of a problem, that are listed."""


@dataclass(frozen=True)
class Job:
    """One combination of a sweep."""

    composed: Composed
    run_dir: Path
    overrides: list[str]
    hydra: DictConfig
    experiment: Experiment | None
    """None when the combination cannot work."""
    reason: str = ""


def run_sweep(composer: Composer) -> int:
    """Run a sweep from the command line; exit status 1 when a run failed, crashed or timed out."""
    try:
        returned = composer.sweep()
    except OSError as error:
        raise ConfigError(f"the sweep directory cannot be written: {error}") from None
    results = [result for batch in returned or [] for result in batch] if isinstance(returned, list) else []
    states = [read_status(Path(result.working_dir)).get("state") for result in results]
    return 1 if any(state in ("failed", "timeout") for state in states) else 0


def run_jobs(loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """What Hydra's sweeper calls: all combinations of a batch at once. Raises ConfigError that lists all wrong ones."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    jobs: list[Job] = []
    wrong: dict[str, list[str]] = {}
    varying = _varying(job_overrides)
    for number, overrides in enumerate(job_overrides, first):
        own = [override for override in overrides if override in varying]
        try:
            jobs.append(_compose_job(loader, config, list(overrides), number, sweep_dir / job_name(number, own)))
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(f"job {number} ({' '.join(own)})")
    if wrong:
        _remove_empty(sweep_dir)
        raise ConfigError("\n".join(_wrong_jobs(wrong)))
    for job in jobs:
        place(job.composed.config, job.run_dir, job.composed.overrides)
        if job.experiment is None:
            update_status(job.run_dir, state="skipped", reason=job.reason)
    _record_sweep(sweep_dir, jobs)
    results: list[JobReturn] = []
    stopped = False
    for job in jobs:
        results.append(_run_job(job, stopped))
        failed = read_status(job.run_dir).get("state") in FAILED
        stopped = stopped or (failed and job.experiment is not None and job.experiment.sweep.fail_fast)
    return results


def _compose_job(loader: Any, config: DictConfig, overrides: list[str], number: int, run_dir: Path) -> Job:
    composed_config = loader.load_sweep_config(config, overrides)
    with open_dict(composed_config):
        composed_config.hydra.job.id, composed_config.hydra.job.num = str(number), number
    composed = split(composed_config, run_dir)
    hydra = OmegaConf.masked_copy(composed_config, ["hydra"])
    try:
        experiment = check(composed.config)
        if rule := excluding(experiment.sweep.exclude, composed):
            raise Incompatible(f"sweep.exclude: {rule}")
        fit_continuing(experiment, run_dir, resolve(experiment)[1])
    except Incompatible as error:
        return Job(composed, run_dir, overrides, hydra, None, str(error))
    return Job(composed, run_dir, overrides, hydra, experiment)


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
    """The overrides that not all jobs have in common; all of them when there is only one job."""
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


def _record_sweep(sweep_dir: Path, jobs: list[Job]) -> None:
    path = sweep_dir / "sweep.json"
    known = json.loads(path.read_text())["jobs"] if path.exists() else []
    added = [{"name": job.run_dir.name, "overrides": job.overrides} for job in jobs]
    write_json(path, {"command": sys.argv, "jobs": known + added})


def _run_job(job: Job, stopped: bool) -> JobReturn:
    """Run a job and print its row; when the sweep was stopped by an earlier one it stays `pending`."""
    value = WORST
    print(f"\n{job.run_dir.name}", flush=True)
    if job.experiment is None:
        print(f"skipped: {job.reason}")
    elif stopped:
        print("not started: sweep.fail_fast, and a run before it has failed")
    else:
        outcome, summary = execute(job.run_dir)
        report(job.run_dir, outcome, summary)
        found = summary.get(job.experiment.objective)
        value = float(found) if outcome.state == "completed" and found is not None else WORST
    result = JobReturn(
        overrides=job.overrides,
        cfg=OmegaConf.create(job.composed.config),
        hydra_cfg=job.hydra,
        working_dir=str(job.run_dir),
        task_name="meshrunner",
    )
    result.status, result.return_value = JobStatus.COMPLETED, value
    return result

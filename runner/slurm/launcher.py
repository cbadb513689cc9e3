"""The verbs `submit`, `place` and `cancel`, and hydra/launcher=slurm."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from recipes.option import ConfigError
from runner.batch import RUNS, Elsewhere, checked, remove_empty
from runner.execute import EXIT
from runner.experiment import check
from runner.resume import fit_continuing
from runner.rundir import owner_is_alive, place, read_config, read_json, read_status, update_status
from runner.slurm import script
from runner.slurm.queue import jobs, slurm
from runner.slurm.settings import Slurm
from runner.slurm.submit import RECORD, SETTINGS, arrays, job_id, print_arrays, submit_run, submit_sweep, wait, wanted
from runner.sweep import Ended, returned

if TYPE_CHECKING:
    from runner.compose import Composed

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def launch_jobs(
    loader: Any,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    ended: Callable[[Ended], object],
) -> list[JobReturn]:
    """What Hydra's sweeper calls under hydra/launcher=slurm: all combinations of a batch at once."""
    try:
        settings = _settings(config.hydra.launcher)
        if not settings.wait and not settings.dry_run and config.hydra.sweeper._target_ != BASIC:
            raise ConfigError("this sweeper learns from the runs it has had: it needs hydra.launcher.wait=true")
    except ConfigError:
        remove_empty(Path(config.hydra.sweep.dir).absolute())
        raise
    batch = checked(loader, config, job_overrides, first, settings)
    if settings.dry_run:
        runs = [(run.run_dir, job.experiment) for job, run in batch.ordered if not run.reason]
        todo = wanted([run_dir for run_dir, _ in runs], batch.jobs[0].experiment.sweep.rerun, quiet=True)
        groups = arrays([(run_dir, experiment) for run_dir, experiment in runs if run_dir in todo], settings)
        print_arrays(batch.sweep_dir, batch.names(), groups, settings)
        remove_empty(batch.sweep_dir)
        return []
    run_dirs = batch.place()
    submit_sweep(batch.sweep_dir, batch.names(), settings)
    if not settings.wait:
        return []
    ended(Ended(batch.sweep_dir, wait(run_dirs)))
    return returned(batch, config)


def place_jobs(loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """What Hydra's sweeper calls for `meshrunner place -m`."""
    batch = checked(loader, config, job_overrides, first, Elsewhere())
    batch.place()
    print(f"sweep directory: {batch.sweep_dir}")
    return []


def submit_one(composed: Composed) -> int:
    """`meshrunner submit` without -m; returns the exit status."""
    settings = Slurm.read(composed.launcher)
    composed = settings.adapt(composed)
    experiment = check(composed.config)
    fit_continuing(experiment, composed.run_dir, settings.workers(experiment))
    if settings.dry_run:
        nodes, gpus = experiment.launch.nodes, settings.gpus(experiment)
        print(script.for_run(composed.run_dir, settings, nodes=nodes, gpus=gpus), end="")
        return 0
    place(composed.config, composed.run_dir, composed.overrides)
    submit_run(composed.run_dir, settings)
    return _wait_for_one(composed.run_dir) if settings.wait else 0


def submit_again(folder: Path, overrides: Sequence[str]) -> int:
    """
    Submit what of a run or sweep directory has no result, with the settings of the last time.

    Args:
        overrides: `hydra.launcher.KEY=VALUE`, of those settings.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    # Of a run of a sweep: those of the sweep, unless it was submitted by itself.
    known = _shipped() | (read_json(folder / SETTINGS) or read_json(folder.parent / SETTINGS))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        prefix, _, key = str(override.key_or_group).rpartition(".")
        if prefix != "hydra.launcher":
            raise ConfigError(
                f"{override.key_or_group}: the runs are placed; only hydra.launcher.KEY=VALUE can be changed"
            )
        known[key] = override.value()
    settings = Slurm.read(known)
    if (folder / "config.yaml").exists():
        submit_run(folder, settings)
        return _wait_for_one(folder) if settings.wait and not settings.dry_run else 0
    names = [str(job["name"]) for job in read_json(folder / "sweep.json").get("jobs", [])]
    if not names:
        raise ConfigError(f"{folder} is neither a run directory nor a sweep's")
    if not settings.dry_run:
        (folder / RUNS).write_text("".join(f"{name}\n" for name in names))  # a sweep may have begun on this machine
    submit_sweep(folder, names, settings)
    if not settings.wait or settings.dry_run:
        return 0
    from runner.conclusion import conclude

    status = wait([folder / name for name in names])
    conclude(folder)
    return status


def _wait_for_one(run_dir: Path) -> int:
    wait([run_dir])
    return EXIT.get(str(read_status(run_dir).get("state")), 1)


def _settings(launcher: DictConfig) -> Slurm:
    plain = OmegaConf.to_container(launcher, resolve=True)
    assert isinstance(plain, dict)
    return Slurm.read({str(key): value for key, value in plain.items()})


def _shipped() -> dict[str, Any]:
    from importlib.resources import files

    shipped = OmegaConf.create(files("conf").joinpath("hydra/launcher/slurm.yaml").read_text())
    assert isinstance(shipped, DictConfig)
    return _settings(shipped).model_dump()


def place_one(composed: Composed) -> int:
    """`meshrunner place` without -m: write the run directory, start nothing."""
    experiment = check(composed.config)
    fit_continuing(experiment, composed.run_dir, Elsewhere().workers(experiment))
    place(composed.config, composed.run_dir, composed.overrides)
    print(f"run directory: {composed.run_dir}")
    return 0


def cancel(folder: Path) -> int:
    """Stop what runs or waits of a run or sweep directory; what waited stays `pending`, what ran is `interrupted`."""
    names = [str(job["name"]) for job in read_json(folder / "sweep.json").get("jobs", [])]
    run_dirs = [folder / name for name in names] if names else [folder]
    if not names:
        read_config(folder)
    numbers = {run_dir: number for run_dir in run_dirs if (number := job_id(run_dir))}
    here = [run_dir for run_dir in run_dirs if _runs_here(run_dir)]
    for run_dir in here:
        os.kill(int(read_status(run_dir)["owner"]["pid"]), signal.SIGINT)
    known = jobs(numbers.values())
    living = {run_dir: number for run_dir, number in numbers.items() if number in known and known[number].lives}
    if living:
        slurm("scancel", *sorted(living.values()))
        for run_dir, number in living.items():
            (run_dir / RECORD).unlink(missing_ok=True)
            if known[number].state == "PENDING" and read_status(run_dir).get("state") == "running":
                update_status(run_dir, state="interrupted", reason="cancelled before SLURM had started it again")
    print(f"cancelled {len(living)} job{'s' * (len(living) != 1)} of SLURM's and {len(here)} on this machine")
    return 0


def _runs_here(run_dir: Path) -> bool:
    status = read_status(run_dir)
    owner = status.get("owner") or {}
    return owner_is_alive(status) and not owner.get("slurm_job_id") and owner.get("host") == socket.gethostname()

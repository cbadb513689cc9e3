"""Checks and predicts all combinations of a space. The sweep directory stores the predictions for later commands."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.calibrate import SPEED_OF_CPU, constants_of, scaled
from meshrunner.runner.compare.best import by, cells
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.config.compose import grid
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.hardware import CPU, GPU, Calibrated, CPUSpeed
from meshrunner.runner.console import counted, naming, one_line
from meshrunner.runner.predict import DOES_NOT_FIT, predict_all
from meshrunner.runner.rundir import JsonFile, key_of, short_override
from meshrunner.runner.rundir.files import TUNE, write_json
from meshrunner.runner.sweep.combinations import Combination, Target, check_batch, pending, varying
from meshrunner.runner.tune.belief import Prior, Response, points_for

SET_BY_TUNE = ("steps", "sweep.repeat")
"""Keys that `meshrunner tune` sets for its runs. The values that the user gives for these keys do not affect the search."""
CALIBRATED = 0.3
"""Factor that reduces the uncertainty of constants that were fitted to measured runs."""
TFLOPS_OF_CPU = 0.05
"""Guessed matmul rate of one CPU thread in TFLOP/s, if `hardware` gives no `speed`."""
GUESS_ERROR_PCT = 300.0
"""Error, in percent, that is stated for a predicted speed if the constants of the device are guessed."""
LISTED = 3
"""Maximum number of reasons that are printed."""
LARGEST_BATCH = 4
"""Limit on the common global batch, as a multiple of the largest global batch that a combination has by default."""


class Survey(NamedTuple):
    """The combinations of a space that can run, and the prior distribution of their speeds."""

    jobs: list[Combination]
    """Combinations whose speeds were predicted. Some of them are predicted not to fit (see `Search.cells`)."""
    names: list[str]
    """Short name of each combination, such as `fsdp2 full micro_batch=2`."""
    prior: Prior
    cells: list[list[int]]
    """Numbers of the combinations in each cell. The combinations of a cell have equal values of all `sweep.best_by` keys. Each
    cell has a separate search."""
    lines: list[str]
    """Lines to print: how many combinations are impossible, do not fit or are left, and the most frequent reasons."""


def survey(loader: Any, config: DictConfig, target: Target) -> Survey:
    """Check and predict all combinations of the space. Raise ConfigError if no combination can run or settings are wrong."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    jobs = _with_same_batch(loader, config, target)
    possible = [job for job in jobs if not job.reason]
    if not possible:
        raise ConfigError("\n".join(["tune: no combination can run:", *_frequent(job.reason for job in jobs)]))
    hardware, unknown = _hardware(possible[0])
    constants = constants_of(hardware)
    spread = unknown * np.array([each.unknown for each in constants])
    points = points_for(spread)
    devices = [scaled(hardware, dict(zip((c.key for c in constants), np.exp(p), strict=True))) for p in points]
    forecasts = _predicted(sweep_dir, possible, hardware, devices)
    candidates = [
        (replace(job, plan=found["plan"]), np.log(found["wps"]))
        for job, found in zip(possible, forecasts, strict=True)
        if found["wps"]
    ]
    impossible = [job.reason for job in jobs if job.reason]
    fitting = [number for number, (job, _) in enumerate(candidates) if job.plan["verdict"] != DOES_NOT_FIT]
    left_out = [found["plan"] for found in forecasts if not found["wps"] or found["plan"]["verdict"] == DOES_NOT_FIT]
    unpredicted = [plan["reason"] for plan in left_out if plan["verdict"] != DOES_NOT_FIT]
    parts = f"{len(impossible):,} impossible, {len(left_out) - len(unpredicted):,} do not fit"
    parts += f", {len(unpredicted):,} cannot be predicted" * bool(unpredicted)
    if not fitting:
        raise ConfigError(f"tune: no combination is left to run ({parts}). First reason: {left_out[0]['reason']}")
    varied = varying([job.overrides for job in jobs])
    own = [[each for each in job.overrides if each in varied] for job, _ in candidates]
    names = [" ".join(map(short_override, each)) or "defaults" for each in own]
    speeds = np.array([speed for _, speed in candidates])
    best = max(fitting, key=lambda number: speeds[number].mean())
    lines = [f"{counted(len(jobs), 'combination')}: {parts}, {len(fitting):,} left; predicted best: {names[best]}"]
    lines += _frequent(impossible + unpredicted)
    options = [{key_of(each): each.partition("=")[2] for each in overrides} for overrides in own]
    left = [job for job, _ in candidates]
    return Survey(left, names, Prior(Response(points, speeds), spread, options), _cells(left), lines)


def _frequent(reasons: Iterable[str]) -> list[str]:
    return [f"  {many:,} x {one_line(why)}" for why, many in Counter(reasons).most_common(LISTED)]


def _with_same_batch(loader: Any, config: DictConfig, target: Target) -> list[Combination]:
    """Check all combinations. Set the same global batch in all combinations of a cell, and set the keys in SET_BY_TUNE."""
    own = dict(zip(SET_BY_TUNE, (config.tune.steps, "auto"), strict=True))
    fixed = [f"{key}={value}" for key, value in own.items()]
    given = [[*(each for each in job if key_of(each) not in own), *fixed] for job in grid(loader, config)]
    jobs = check_batch(loader, config, given, 0, target).combinations
    if any(job.experiment.global_batch is not None for job in jobs):  # the user chooses the batch
        return jobs
    for cell in _cells(jobs):
        experiments = [jobs[i].experiment for i in cell if not jobs[i].reason]
        batches = {each.sequences_per_step(target.workers(each)) for each in experiments}
        common, largest = math.lcm(*batches), max(batches, default=1)
        if common > LARGEST_BATCH * largest:
            listed = ", ".join(map(str, sorted(batches)))
            raise ConfigError(
                f"global_batch: tune compares only combinations with the same global batch. The combinations have "
                f"{listed} sequences per step, and the least common multiple of these numbers, {common}, is too large. "
                "Set global_batch, or vary fewer values"
            )
        for i in cell if len(batches) > 1 else ():
            given[i] = [*given[i], f"global_batch={common}"]
    if all(job.overrides == overrides for job, overrides in zip(jobs, given, strict=True)):
        return jobs
    return check_batch(loader, config, given, 0, target).combinations


def _cells(jobs: Sequence[Combination]) -> list[list[int]]:
    """Return the numbers of the jobs in each cell. If `sweep.best_by` is empty, a single cell has all jobs."""
    if not jobs[0].experiment.sweep.best_by:
        return [[*range(len(jobs))]]
    numbers = {job.runs[0].run_dir: number for number, job in enumerate(jobs)}
    found = cells(by(compare_runs([pending(job.runs[0]) for job in jobs])))
    return [[numbers[run.path] for row in cell.rows for run in row.runs] for cell in found]


def _hardware(job: Combination) -> tuple[GPU | CPU, float]:
    """Return the device with its constants before the first run, and a factor for the uncertainty of these constants."""
    experiment = job.experiment
    device = expected_devices(experiment)
    if device.hardware is not None:
        return device.hardware, CALIBRATED if device.hardware.calibrated else 1.0
    if device.type == "cuda":
        raise ConfigError(
            f"tune: no option of the group `hardware` describes {device.name}; add an option, or set hardware=NAME"
        )
    rate = TFLOPS_OF_CPU * (experiment.launch.given_threads or 1)
    speed = {"fp32_tflops": rate, "bf16_tflops": rate, **SPEED_OF_CPU}
    guess = Calibrated(runs=1, error_pct=GUESS_ERROR_PCT)
    return CPU(kind="cpu", speed=CPUSpeed.model_validate(speed), calibrated=guess), 1.0


def _predicted(
    sweep_dir: Path, jobs: Sequence[Combination], hardware: GPU | CPU, devices: Sequence[GPU | CPU]
) -> list[dict[str, Any]]:
    """Predict each combination on each of `devices`, or read the predictions of an earlier command. Return a dict for each
    combination: `plan` is the content of plan.json, `wps` is a list of speeds on `devices`, or [] if unknown."""
    on = hardware.model_dump(mode="json")
    configs = [{**job.runs[0].config, "hardware": on} for job in jobs]
    for config, job in zip(configs, jobs, strict=True):
        config["launch"] = config["launch"] | {"workers": expected_devices(job.experiment).workers}
    keys = [blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest() for config in configs]
    file = sweep_dir / TUNE
    known = JsonFile.peek(file).as_json()
    missing = [number for number, key in enumerate(keys) if key not in known]
    with naming(f"predicting {counted(len(missing), 'combination')}") as progress:
        found = predict_all([configs[i] for i in missing], active_only=True, variants=devices, progress=progress)
    for number, each in zip(missing, found, strict=True):
        speeds = [float(f"{wps:.6g}") for wps in each.wps_on]
        known[keys[number]] = {"plan": each.as_json(), "wps": speeds}
    if missing:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        write_json(file, known)
    return [known[key] for key in keys]

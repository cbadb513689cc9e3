"""Reads the speed of a device from run directories, for `calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.calibrate.fit import MeasuredRun
from meshrunner.runner.compare.comparison import WPS, Row, compare_runs
from meshrunner.runner.compare.keys import row_name
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.devices import ExpectedDevices
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.hardware import CPU, GPU, CPUSpeed
from meshrunner.runner.console import one_line
from meshrunner.runner.predict import not_planned, trace_workload, why
from meshrunner.runner.rundir import Summary

SPEED_OF_CPU = {
    "attention": 0.3,
    "memory_bandwidth": 8.0,
    "operator_s": 2e-5,
    "link_bandwidth": 1.0,
    "collective_s": 3e-4,
    "jitter": 0.05,
}
"""Constants of a processor at which the search begins, besides the matmul rate that runs have measured for MFU."""
DATA_SHEET = ("peak", "memory_bandwidth", "link_bandwidth", "network_bandwidth")
"""Rates of a GPU that a fit finds shares of."""
FEWEST = 2
"""Fewest combinations to fit to."""
ROUGH = 0.7
"""Share of the measured matmul rate that the search assumes a model's matmuls reach."""


class Measured(NamedTuple):
    """Measured runs of some run and sweep directories."""

    runs: list[MeasuredRun]
    hardware: GPU | CPU
    """Device of all runs, with the constants it had."""
    left_out: dict[str, str]
    """Combination -> reason why it is not used."""


class _Candidate(NamedTuple):
    """A combination with a measured speed, as it was executed."""

    name: str
    wps: float
    experiment: Experiment
    device: ExpectedDevices
    identity: str
    """Name of the device; for a processor also the threads of a worker, on which its rates depend."""


def read_measured(folders: Sequence[Path]) -> Measured:
    """
    Read runs, merge repeats, and trace each combination once.

    Raises:
        ConfigError: a directory holds no run, fewer than FEWEST combinations have a speed, or they ran on different devices.
    """
    comparison = compare_runs(read_runs(folders))
    candidates: list[_Candidate] = []
    left_out: dict[str, str] = {}
    for row in comparison.rows:
        name = row_name(row.values, comparison.keys) or row.runs[0].path.name
        try:
            candidates.append(_candidate(name, row))
        except ConfigError as error:
            left_out[name] = one_line(str(error))
    _check_enough(len(candidates), left_out)
    devices = list(dict.fromkeys(each.identity for each in candidates))
    if len(devices) > 1:
        raise ConfigError(f"calibrate: the runs used different devices: {'; '.join(devices)}. Name runs of one device")
    hardware = _with_rates([each.device.hardware for each in candidates if each.device.hardware is not None])
    runs = []
    for each in candidates:
        try:
            workload = trace_workload(each.experiment, each.device._replace(hardware=hardware))
        except Exception as error:  # a user's model may raise anything
            left_out[each.name] = f"it cannot be traced: {why(error)}"
        else:
            runs.append(MeasuredRun(each.name, workload, each.wps))
    _check_enough(len(runs), left_out)
    return Measured(runs, hardware, left_out)


def _check_enough(combinations: int, left_out: dict[str, str]) -> None:
    """Raise ConfigError if leaving one combination out leaves none to predict it from."""
    if combinations < FEWEST:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        many = f"{combinations} combination{'s' * (combinations != 1)}"
        raise ConfigError(
            f"calibrate: {many} with a speed, at least {FEWEST} are needed{':' if reasons else ''}{reasons}"
        )


def _candidate(name: str, row: Row) -> _Candidate:
    """Return a combination's speed and device; raises ConfigError if they are not known."""
    wps = row.figures.get(WPS.summary_keys[0]) if row.completed else None
    if not wps or wps < 0:
        raise ConfigError(row.reason or f"no speed was measured: {row.state}")
    run = row.completed[0]
    environment, summary = run.environment, run.summary
    workers, threads = environment.workers, environment.threads
    device_type, device_name = environment.device_type, summary.device
    if workers is None or threads is None or device_type is None or device_name is None:
        raise ConfigError("its record does not say on what devices it ran")
    experiment = check(run.config | {"launch": run.config["launch"] | {"workers": workers}}).on(device_type)
    fit(experiment, workers)
    if reason := not_planned(experiment):
        raise ConfigError(reason)
    if device_type == "cpu":
        identity = f"{device_name}, {threads} thread{'s' * (threads > 1)} per worker"
        device = ExpectedDevices("cpu", _cpu(summary), device_name, 0.0, workers)
        return _Candidate(name, wps, experiment, device, identity)
    hardware = experiment.hardware.found(device_name, summary.device_memory_gib or 0.0)
    if not isinstance(hardware, GPU):
        raise ConfigError(f"no option of the group `hardware` describes {device_name}")
    device = ExpectedDevices("cuda", hardware, device_name, hardware.memory_gib, workers)
    return _Candidate(name, wps, experiment, device, hardware.name)


def _cpu(summary: Summary) -> CPU:
    """Return a processor whose matmuls reach the rate that the run measured in its dtype."""
    tflops, rate = summary.peak_tflops, summary.peak_rate
    if not tflops or tflops < 0 or rate not in ("fp32", "bf16"):
        raise ConfigError("the matmul rate of its processor was not measured")
    speed = {"fp32_tflops": None, "bf16_tflops": None, f"{rate}_tflops": ROUGH * tflops, **SPEED_OF_CPU}
    return CPU(kind="cpu", speed=CPUSpeed.model_validate(speed))


def _with_rates(hardware: Sequence[GPU | CPU]) -> GPU | CPU:
    """
    Return the one device of all runs; a processor with every rate that one of them measured.

    Raises:
        ConfigError: the runs' data sheets differ.
    """
    first = hardware[0]
    if isinstance(first, GPU):
        for key in DATA_SHEET:
            if any(getattr(each, key) != getattr(first, key) for each in hardware):
                raise ConfigError(
                    f"calibrate: the runs had different values of hardware.{key}. Name runs with the same value"
                )
        return first
    speeds = [each.speed for each in hardware if isinstance(each, CPU) and each.speed is not None]
    known = {
        rate: next((found for each in speeds if (found := getattr(each, rate)) is not None), None)
        for rate in ("fp32_tflops", "bf16_tflops")
    }
    return first.model_copy(update={"speed": speeds[0].model_copy(update=known)})

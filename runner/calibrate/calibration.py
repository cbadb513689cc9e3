"""Calibrates a device: fits the constants in its `hardware` section to measured runs. Runs with equal settings count as one."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.config_keys import with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.calibrate.fit import Fitted, MeasuredRun, constant, fit, leave_one_out_errors
from meshrunner.runner.compare.comparison import WPS, compare_runs
from meshrunner.runner.compare.runs import Row, read_runs
from meshrunner.runner.config import consistency
from meshrunner.runner.config.devices import ExpectedDevices
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.hardware import CPU, GPU, Calibrated, CPUSpeed
from meshrunner.runner.console import counted, one_line
from meshrunner.runner.figures import figure_of
from meshrunner.runner.predict import why

SPEED_OF_CPU = {
    "attention": 0.3,
    "memory_bandwidth": 8.0,
    "operator_s": 2e-5,
    "link_bandwidth": 1.0,
    "collective_s": 3e-4,
    "jitter": 0.05,
}
"""Initial values for the fit of a CPU's constants. The initial value of the matmul rate is ROUGH x the measured rate."""
DATA_SHEET = ("peak", "memory_bandwidth", "link_bandwidth", "network_bandwidth")
"""Keys of a GPU's data-sheet rates. The rates must be equal in all runs, because fitted efficiencies are fractions of them."""
COMPUTE = figure_of("perf/compute_step_time_s")
FEWEST = 2
ROUGH = 0.7
"""Guessed ratio of a CPU's matmul rate in training to its rate in a matmul benchmark. The fit starts from this guess."""


@dataclass(frozen=True)
class Calibration:
    """Fitted constants of a device, the runs used for the fit, and the prediction errors."""

    runs: list[MeasuredRun]
    left_out_errors: list[float]
    """Error of each run's predicted speed in percent, with constants fitted to the other runs only."""
    left_out: dict[str, str]
    """Reasons why the fit does not use some combinations of settings, keyed by the name of the combination."""
    before: GPU | CPU
    hardware: GPU | CPU
    """The device with its constants before and after the fit."""
    fitted: Fitted

    def as_json(self) -> dict[str, Any]:
        keys = self.fitted.unknown
        return {
            "runs": [
                {
                    "run": run.name,
                    "perf/wps": run.wps,
                    "plan/perf/wps": run.workload.wps(self.hardware),
                    "error_pct": run.error_pct(self.hardware),
                    "left_out_error_pct": error,
                }
                for run, error in zip(self.runs, self.left_out_errors, strict=True)
            ],
            "left_out": self.left_out,
            "tells_apart": self.fitted.tells_apart,
            "ratio_unknown_pct": 100 * self.fitted.ratio_unknown,
            "unknown_pct": {key: 100 * share for key, share in keys.items()},
            "before": {key: constant(self.before, key) for key in keys},
            "fitted": {key: constant(self.hardware, key) for key in keys},
            "hardware": self.hardware.model_dump(mode="json"),
        }


def calibrate_device(folders: Sequence[Path]) -> Calibration:
    """Fit a device's constants to runs in `folders`. Raise ConfigError if fewer than FEWEST runs are usable or devices differ."""
    from meshrunner.runner.predict import trace_workload  # imports torch

    comparison = compare_runs(read_runs(folders))
    candidates: list[_Candidate] = []
    left_out: dict[str, str] = {}
    for row in comparison.rows:
        name = comparison.name(row)
        try:
            candidates.append(_candidate(name, row))
        except ConfigError as error:
            left_out[name] = one_line(error)
    _check_enough(len(candidates), left_out)
    hardware = _device(candidates)
    runs = []
    for each in candidates:
        try:
            workload = trace_workload(each.experiment, each.device._replace(hardware=hardware))
        except Exception as error:  # a user's model may raise anything
            left_out[each.name] = f"the model cannot be traced: {why(error)}"
        else:
            wps = workload.tokens / each.compute_s if each.compute_s else each.wps
            runs.append(MeasuredRun(each.name, workload, wps))
    _check_enough(len(runs), left_out)
    fitted = fit(hardware, runs)
    errors = leave_one_out_errors(hardware, runs, fitted)
    # Round up, so that the stated error is never smaller than an observed error.
    calibrated = Calibrated(runs=len(runs), error_pct=math.ceil(10 * max(map(abs, errors))) / 10)
    after = fitted.hardware.model_copy(update={"calibrated": calibrated})
    return Calibration(runs, errors, left_out, hardware, after, fitted)


class _Candidate(NamedTuple):
    name: str
    wps: float
    """Measured tokens per second per device; 0 if an emulated rank measured only `compute_s`."""
    compute_s: float | None
    """Measured seconds per step of an emulated rank, without communication; None if all ranks ran."""
    experiment: Experiment
    device: ExpectedDevices
    """Device of the run. A CPU's name includes the number of threads per worker, because a CPU's rates depend on that number."""
    matmul_rate: dict[str, float]
    """Matmul rate from which a CPU's fit starts: ROUGH x the measured rate, such as {'fp32_tflops': 0.4}. Empty for a GPU."""


def _candidate(name: str, row: Row) -> _Candidate:
    """Return the combination of settings in `row` with its speed and device. Raise ConfigError if the fit cannot use `row`."""
    found = row.figures if row.completed else {}
    wps, compute_s = found.get(WPS.summary_keys[0]) or 0.0, found.get(COMPUTE.summary_keys[0])
    if (compute_s or wps) <= 0:
        raise ConfigError(row.reason or f"no speed was measured: {row.state}")
    run = row.completed[0]
    environment, summary = run.environment, run.summary
    workers, threads, device_type = environment.workers, environment.threads, environment.device_type
    if workers is None or threads is None or device_type is None or summary.device is None:
        raise ConfigError("the records of the run do not name its devices")
    experiment = check(with_value(run.config, "launch.workers", workers)).on(device_type)
    consistency.fit(experiment, workers)
    if reason := experiment.untraceable():
        raise ConfigError(reason)
    if device_type == "cpu":
        tflops, rate = summary.peak_tflops, summary.peak_rate
        if not tflops or tflops < 0 or rate not in ("fp32", "bf16"):
            raise ConfigError("the run did not measure the matmul rate of its CPU")
        device_name = f"{summary.device}, {threads} thread{'s' * (threads > 1)} per worker"
        device = ExpectedDevices("cpu", None, device_name, 0.0, workers)
        return _Candidate(name, wps, compute_s, experiment, device, {f"{rate}_tflops": ROUGH * tflops})
    hardware = experiment.hardware.found(summary.device, summary.device_memory_gib or 0.0)
    if not isinstance(hardware, GPU):
        raise ConfigError(f"no option of the group `hardware` describes {summary.device}")
    device = ExpectedDevices("cuda", hardware, hardware.name, hardware.memory_gib, workers)
    return _Candidate(name, wps, compute_s, experiment, device, {})


def _check_enough(combinations: int, left_out: dict[str, str]) -> None:
    if combinations < FEWEST:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        many = counted(combinations, "combination")
        raise ConfigError(
            f"calibrate: found {many} with a measured speed, but at least {FEWEST} are needed"
            f"{'. Combinations that were not used:' if reasons else ''}{reasons}"
        )


def _device(candidates: Sequence[_Candidate]) -> GPU | CPU:
    """Return the device that all runs used. For a CPU, set each matmul rate that at least one run measured."""
    names = list(dict.fromkeys(each.device.name for each in candidates))
    if len(names) > 1:
        raise ConfigError(
            f"calibrate: the runs used different devices: {'; '.join(names)}. Pass only runs that used the same device"
        )
    first, *others = (each.device.hardware for each in candidates)
    if not isinstance(first, GPU):
        rates = {rate: value for each in reversed(candidates) for rate, value in each.matmul_rate.items()}
        speed = {"fp32_tflops": None, "bf16_tflops": None, **rates, **SPEED_OF_CPU}
        return CPU(kind="cpu", speed=CPUSpeed.model_validate(speed))
    for key in DATA_SHEET:
        if any(getattr(each, key) != getattr(first, key) for each in others):
            raise ConfigError(
                f"calibrate: the runs have different values of hardware.{key}. Pass only runs with equal hardware.{key}"
            )
    return first


def as_yaml(calibration: Calibration) -> str:
    """Return the text of a `hardware` file. Round numbers to four significant digits, because further digits are noise."""
    import yaml

    def rounded(number: str) -> float:
        return float(f"{float(number):.4g}")

    hardware = json.loads(calibration.hardware.model_dump_json(), parse_float=rounded)
    many, error = hardware["calibrated"]["runs"], hardware["calibrated"]["error_pct"]
    title = f"# Fitted to {many} measured combinations; each was predicted to within {error:g}% by fitting the others\n"
    return title + yaml.safe_dump(hardware, sort_keys=False, default_flow_style=None, width=120)

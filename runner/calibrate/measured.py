"""What run directories say about the speed of a device, as `calibrate` takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.calibrate.fit import Observed
from meshrunner.runner.compare.keys import row_name
from meshrunner.runner.compare.rows import WPS, Row, compare_runs
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.config.devices import Described
from meshrunner.runner.config.experiment import Experiment, check, fit
from meshrunner.runner.config.hardware import CPU, GPU, CPUSpeed
from meshrunner.runner.console import one_line
from meshrunner.runner.predict.predict import not_planned, speed_of
from meshrunner.runner.predict.record.trace_events import Allocated, EventLog, Freed, UsedByStream
from meshrunner.runner.predict.trace.faults import why
from meshrunner.runner.rundir.summary import Summary

SPEED_OF_CPU = {
    "attention": 0.3,
    "memory_bandwidth": 8.0,
    "operator_s": 2e-5,
    "link_bandwidth": 1.0,
    "collective_s": 3e-4,
    "jitter": 0.05,
}
"""Where the search for those of a processor begins; besides them the rate of its products that runs have measured for MFU."""
DATA_SHEET = ("peak", "memory_bandwidth", "link_bandwidth", "network_bandwidth")
"""Rates of a GPU, which a fit finds shares of."""
FEWEST = 2
"""Combinations."""
ROUGH = 0.7
"""Share of that rate that the products of a model reach at first."""


class Measured(NamedTuple):
    """Of some run and sweep directories."""

    observed: list[Observed]
    hardware: GPU | CPU
    """The device that all ran on, with the constants that it had."""
    left_out: dict[str, str]
    """Combination -> why it says nothing."""


class _Ran(NamedTuple):
    """A combination, as it was executed."""

    name: str
    wps: float
    experiment: Experiment
    device: Described
    identity: str
    """Name of the device; of a processor with the threads of a worker, on which its rates depend."""


def measured(folders: Sequence[Path]) -> Measured:
    """
    Read runs, merge repeats, and rehearse each combination once.

    Raises:
        ConfigError: a folder holds no run, fewer than FEWEST combinations have a speed, or they ran on different devices.
    """
    comparison = compare_runs(read_runs(folders))
    ran: list[_Ran] = []
    left_out: dict[str, str] = {}
    for row in comparison.rows:
        name = row_name(row.values, comparison.keys) or row.runs[0].path.name
        try:
            ran.append(_ran(name, row))
        except ConfigError as error:
            left_out[name] = one_line(str(error))
    _enough(len(ran), left_out)
    devices = list(dict.fromkeys(each.identity for each in ran))
    if len(devices) > 1:
        raise ConfigError(f"calibrate: the runs were on different devices, name those of one: {'; '.join(devices)}")
    hardware = _with_rates([each.device.hardware for each in ran if each.device.hardware is not None])
    observed = []
    for each in ran:
        try:
            run = speed_of(each.experiment, each.device._replace(hardware=hardware))
        except Exception as error:  # a user's model may raise anything
            left_out[each.name] = f"it cannot be rehearsed: {why(error)}"
        else:
            # Without memory, which takes no time, a fit is three times as fast.
            observed.append(Observed(each.name, run._replace(logs=tuple(map(_of_time, run.logs))), each.wps))
    _enough(len(observed), left_out)
    return Measured(observed, hardware, left_out)


def _of_time(log: EventLog) -> EventLog:
    return [entry for entry in log if not isinstance(entry, Allocated | Freed | UsedByStream)]


def _enough(combinations: int, left_out: dict[str, str]) -> None:
    """Raises ConfigError where one that is left out leaves nothing to predict it from."""
    if combinations < FEWEST:
        why = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        many = f"{combinations} combination{'s' * (combinations != 1)}"
        raise ConfigError(f"calibrate: {many} with a speed, at least {FEWEST} are needed{':' if why else ''}{why}")


def _ran(name: str, row: Row) -> _Ran:
    """Raises ConfigError where a combination says nothing about a device."""
    wps = row.figures.get(WPS.summary_keys[0]) if row.completed else None
    if not wps or wps < 0:
        raise ConfigError(row.reason or f"no speed was measured: {row.state}")
    run = row.completed[0]
    environment, summary = run.environment, run.summary
    workers, threads = environment.workers, environment.threads
    device_type, device_name = environment.device_type, summary.device
    if workers is None or threads is None or device_type is None or device_name is None:
        raise ConfigError("it does not say on what devices it ran")
    experiment = check(run.config | {"launch": run.config["launch"] | {"workers": workers}}).on(device_type)
    fit(experiment, workers)
    if why := not_planned(experiment):
        raise ConfigError(why)
    if device_type == "cpu":
        identity = f"{device_name}, {threads} thread{'s' * (threads > 1)} a worker"
        device = Described("cpu", _cpu(experiment, summary), device_name, 0.0, workers)
        return _Ran(name, wps, experiment, device, identity)
    hardware = experiment.hardware.found(device_name, summary.device_memory_gib or 0.0)
    if not isinstance(hardware, GPU):
        raise ConfigError(f"no file of the group `hardware` describes {device_name}")
    device = Described("cuda", hardware, device_name, hardware.memory_gib, workers)
    return _Ran(name, wps, experiment, device, hardware.name)


def _cpu(experiment: Experiment, summary: Summary) -> CPU:
    """A processor whose products reach what the run has measured in its dtype."""
    tflops, rate = summary.peak_tflops, summary.peak_rate
    if not tflops or tflops < 0 or rate not in ("fp32", "bf16"):
        raise ConfigError("its processor's rate of matrix products was not measured")
    speed = {"fp32_tflops": None, "bf16_tflops": None, f"{rate}_tflops": ROUGH * tflops, **SPEED_OF_CPU}
    return CPU(kind="cpu", speed=CPUSpeed.model_validate(speed))


def _with_rates(hardware: Sequence[GPU | CPU]) -> GPU | CPU:
    """
    The one device of all runs, a processor with every rate that one of them has measured.

    Raises:
        ConfigError: its data sheet is not the same in all.
    """
    first = hardware[0]
    if isinstance(first, GPU):
        for key in DATA_SHEET:
            if any(getattr(each, key) != getattr(first, key) for each in hardware):
                raise ConfigError(f"calibrate: the runs had different values of hardware.{key}, name those of one")
        return first
    speeds = [each.speed for each in hardware if isinstance(each, CPU) and each.speed is not None]
    known = {
        rate: next((found for each in speeds if (found := getattr(each, rate)) is not None), None)
        for rate in ("fp32_tflops", "bf16_tflops")
    }
    return first.model_copy(update={"speed": speeds[0].model_copy(update=known)})

"""The error of predictions, found by comparing them with published runs. `python -m bench published` writes published.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.rundir import parse_yaml


class Regime(NamedTuple):
    """Published runs of one kind, and the largest error of their predictions."""

    hardware: str
    """`name` of the device."""
    precision: str
    seq_len: int
    """Largest sequence length of the runs."""
    above: int
    """Sequence lengths up to this one belong to another regime."""
    nodes: int
    """Largest number of nodes of the runs."""
    speed_pct: float
    """Largest error of a predicted speed, in percent."""


class StatedError(NamedTuple):
    """Error of a prediction that is stated with it."""

    speed_pct: float
    basis: str
    """Sentence with `speed_pct` and the measured runs in which it was found."""


def stated_error(experiment: Experiment, hardware: GPU | CPU) -> StatedError:
    """Return the error of a predicted speed: that of the calibration, else that of published runs like this one."""
    if hardware.calibrated is not None:
        error = hardware.calibrated.error_pct
        return StatedError(error, f"calibrated; each measured run was predicted from the others to within {error:g}%")
    assert isinstance(hardware, GPU), "a CPU has no speed before it is calibrated"
    precision, seq_len, nodes = experiment.precision.kind, experiment.seq_len, experiment.launch.nodes
    for each in regimes():
        if (
            (each.hardware, each.precision) == (hardware.name, precision)
            and each.above < seq_len <= each.seq_len
            and nodes <= each.nodes
        ):
            runs = f"published {precision} runs on {each.hardware}, sequences of up to {each.seq_len:,} tokens"
            return StatedError(each.speed_pct, f"uncalibrated; {runs}, were predicted to within {each.speed_pct:g}%")
    error = max(each.speed_pct for each in regimes())
    run = f"{precision} on {hardware.name}, {seq_len:,} tokens, {nodes} node{'s' * (nodes > 1)}"
    never = f"uncalibrated; never compared with a published run of this kind ({run})"
    return StatedError(error, f"{never}; other published runs were predicted to within {error:g}%")


@cache
def regimes() -> list[Regime]:
    """Return the regimes in published.yaml."""
    return [Regime(**each) for each in parse_yaml(Path(__file__).with_suffix(".yaml").read_text())]

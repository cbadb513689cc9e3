"""States the error of predicted speeds: the largest error in comparable published runs (see `Regime`).
`python -m bench published` predicts the published runs and writes published.yaml."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.model.llama import Llama, MoE
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.console import counted
from meshrunner.runner.rundir import parse_yaml

CUDNN_UNKNOWN = (
    ". hardware.efficiency describes FlashAttention, but on this device, torch uses cuDNN's attention, which may be faster. "
    "Attention's share of the step time is therefore added to the error of the predicted speed. `meshrunner calibrate` "
    "fits the rates to measured runs"
)


class Regime(NamedTuple):
    """Group of published runs with the same device and precision, and the largest error of their predicted speeds."""

    hardware: str
    precision: str
    shortest: int
    longest: int
    """Smallest and largest sequence length of the runs."""
    devices: int
    """Largest number of devices that a run used."""
    runs: int
    speed_pct: float
    """Largest error in percent, rounded up."""


def stated_error(experiment: Experiment, hardware: GPU | CPU, devices: int) -> tuple[float, str]:
    """Return the error of a predicted speed in percent, and a sentence that names the runs in which it was observed. For a
    calibrated device, the error comes from the calibration. Otherwise, the error is `speed_pct` of the matching `Regime` or, if
    no regime matches, the largest `speed_pct`. `devices`: number of devices of the predicted run."""
    if hardware.calibrated is not None:
        pct = hardware.calibrated.error_pct
        return pct, f"calibrated; each measured run was predicted to within {pct:g}% by a fit to the others"
    assert isinstance(hardware, GPU), "the speed of a CPU is unknown before calibration"
    kind, tokens = (hardware.name, experiment.precision.kind), experiment.seq_len
    model = experiment.model
    dense = isinstance(model, Llama) and not isinstance(model, MoE)  # all published runs trained such models
    for each in regimes() if dense else ():
        if each[:2] == kind and each.shortest <= tokens <= each.longest and devices <= each.devices:
            span = f"{each.shortest:,} to {each.longest:,}" if each.shortest < each.longest else f"{each.longest:,}"
            runs = f"{each.runs} published {kind[1]} runs on {kind[0]} ({span} tokens, at most {counted(each.devices, 'device')})"
            return each.speed_pct, f"uncalibrated; predictions of {runs} were off by up to {each.speed_pct:g}%"
    pct = max(each.speed_pct for each in regimes())
    own = "" if dense else f"{model.kind} in "
    run = f"{own}{kind[1]} on {kind[0]}, {tokens:,} tokens, {counted(devices, 'device')}"
    others = f"predictions of other published runs were off by up to {pct:g}%"
    return pct, f"uncalibrated; no published run covers {run}; {others}"


@cache
def regimes() -> list[Regime]:
    return [Regime(**each) for each in parse_yaml(Path(__file__).with_suffix(".yaml").read_text())]

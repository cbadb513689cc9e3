"""What is predicted of runs before they begin. A prediction that fails or takes too long stops nothing: the run begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshrunner.runner.config.devices import described_type
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.console import naming, one_line, warn
from meshrunner.runner.predict.pool import NOT_IN_TIME, Predicted, predict_all
from meshrunner.runner.predict.verdict import MISFIT, NOT_PLANNED

BUDGET_S = 60.0
"""Longest that runs wait for their predictions."""


def wanted(experiment: Experiment, *, here: bool) -> bool:
    """
    Whether a run is to be predicted: on a GPU, and with sweep.preflight=skip also on a CPU.

    Args:
        here: whether it is executed on this machine, where hardware that is not named can be found.
    """
    if experiment.sweep.preflight == "off":
        return False
    if isinstance(experiment.hardware, GPU):
        return True
    return here and (experiment.sweep.preflight == "skip" or described_type(experiment.hardware) == "cuda")


def foretold(configs: Sequence[dict[str, Any]], workers: Sequence[int]) -> list[dict[str, Any]]:
    """
    The predictions of some runs, {} where there is none; a line says so.

    Args:
        configs: as in config.yaml.
        workers: of each, on a node.
    """
    if not configs:
        return []
    resolved = [
        config | {"launch": config["launch"] | {"workers": count}}
        for config, count in zip(configs, workers, strict=True)
    ]
    many = f"{len(configs):,} combinations" if len(configs) > 1 else "memory and speed"
    try:
        with naming(f"predicting {many}"):
            found = predict_all(resolved, active_only=True, within_s=BUDGET_S)
    except Exception as error:  # the forkserver was killed, the disk is full
        found = [Predicted(None, f"{type(error).__name__}: {error}")] * len(configs)
    late = sum(each is NOT_IN_TIME for each in found)
    if late:
        warn(f"preflight: {late:,} of {len(found):,} were not predicted within {BUDGET_S:g} s, and begin all the same")
    faults = [fault for each in found if each is not NOT_IN_TIME and (fault := _fault(each))]
    if faults:
        warn(
            f"preflight: {len(faults):,} of {len(found):,} could not be predicted, and begin all the same: "
            f"{one_line(faults[0])}"
        )
    return [each.found or {} for each in found]


def _fault(predicted: Predicted) -> str:
    """Why there is no prediction; empty where there is one."""
    found = predicted.found or {}
    return str(found["reason"]) if found.get("verdict") == NOT_PLANNED else predicted.fault


def misfit(found: dict[str, Any]) -> str:
    """Why a predicted run certainly does not fit; empty if it may."""
    return f"predicted not to fit: {found.get('reason')}" if found.get("verdict") == MISFIT else ""


def of_single_run(config: dict[str, Any], experiment: Experiment, workers: int, *, here: bool) -> dict[str, Any]:
    """
    The prediction of a run that is not one of a sweep, {} for none. One that does not fit is only warned of.

    Args:
        here: as of `wanted`.
    """
    if not wanted(experiment, here=here):
        return {}
    (found,) = foretold([config], [workers])
    if why := misfit(found):
        warn(why)
    return found

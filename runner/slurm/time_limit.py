"""Derive the time limit of a job from predictions, if hydra.launcher.time is null."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.slurm.client import slurm

STEP = "perf/step_time_s"
SLACK = 2.0
"""Factor by which the limit exceeds the predicted time of the steps, to allow for checkpoints and slower nodes."""


def predicted_limit(runs: Iterable[tuple[Experiment, Mapping[str, Any]]], partition: str | None) -> str | None:
    """Return the limit of the longest run: launch.start_timeout_minutes + SLACK x predicted time of all steps. Return None if a
    run has no predicted speed or the partition allows less time. `runs`: configuration and content of plan.json of each run."""
    minutes = 0
    for experiment, plan in runs:
        if (step_s := plan.get(STEP)) is None:
            return None
        training_s = SLACK * step_s * experiment.steps
        minutes = max(minutes, math.ceil(experiment.launch.start_timeout_minutes + training_s / 60))
    return f"{minutes // 60}:{minutes % 60:02}:00" if 0 < minutes <= _longest(partition) else None


def _longest(partition: str | None) -> float:
    """Return the longest time, in minutes, that a partition (None: the default one) allows, or infinity if SLURM fails."""
    try:
        text = slurm("sinfo", "--noheader", "--format=%P %l", *([f"--partition={partition}"] if partition else []))
    except ConfigError:
        return math.inf
    limits = [line.split() for line in text.splitlines()]
    return min((_minutes(limit) for name, limit in limits if partition or name.endswith("*")), default=math.inf)


def _minutes(limit: str) -> float:
    """Convert a time limit of `sinfo`, such as 2-00:00:00 or 30:00, to minutes. Return infinity if the text is not a time."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if found is None:
        return math.inf
    days, hours, minutes, _ = (int(each or 0) for each in found.groups())
    return (24 * days + hours) * 60 + minutes

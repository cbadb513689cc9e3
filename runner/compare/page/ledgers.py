"""Divides the step time of a traced row into lines, such as `compute`, and the peak memory of a row into categories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from statistics import median

from meshrunner.runner.compare.runs import Row, Run
from meshrunner.runner.figures import figure_of, number
from meshrunner.runner.ledger.allocations import CATEGORIES
from meshrunner.runner.rundir import Explanation
from meshrunner.runner.rundir.files import EXPLANATION

STEP_TIME = figure_of("perf/step_time_s")
UNEXPLAINED = "unexplained"
"""Line with the difference between the measured total and the sum of all other lines."""
COMPUTE, COMMUNICATION = "compute", "exposed communication"
GROUPS = {"host in optimizer": "host"} | {name: name for name in ("pipeline wait", "data", "host", UNEXPLAINED)}
"""Groups of the lines that are neither compute nor communication, keyed by line."""


def group_of(line: str) -> str:
    """Return the group of a line: COMPUTE, COMMUNICATION or a value of GROUPS."""
    return COMMUNICATION if line.startswith("exposed ") else GROUPS.get(line, COMPUTE)


def with_rest(lines: Mapping[str, float], whole: float) -> dict[str, float]:
    """Add the line UNEXPLAINED, so that the lines add up to `whole`."""
    return {**lines, UNEXPLAINED: whole - math.fsum(lines.values())}


def traces(row: Row) -> list[tuple[Run, Explanation]]:
    """Return a (run, trace) pair for each completed run whose last steps were traced."""
    read = [(run, Explanation.read(run.path / EXPLANATION)) for run in row.completed]
    # If the run was continued without tracing, its last step is not a traced step.
    return [(run, found) for run, found in read if found.seconds and found.steps[1] == run.summary.steps]


def traced(row: Row) -> dict[str, float]:
    """Return the median seconds of each ledger line in the traced steps. UNEXPLAINED is the rest of it. {} without a trace."""
    found: list[dict[str, list[float]]] = []
    for run, trace in traces(row):
        predicted = run.figures.get("perf/communication_s_median")  # an emulated run waits for no other rank
        found.append(trace.seconds | ({COMMUNICATION: [predicted]} if predicted else {}))
    times = row.measured(STEP_TIME)
    if not found or not times:
        return {}
    # If a run's trace lacks a line, the run spent no time on that kind of work.
    lines = {
        name: median(chain.from_iterable(each.get(name, [0.0]) for each in found)) for each in found for name in each
    }
    return with_rest(lines, median(times))


def live_memory(row: Row) -> dict[str, float]:
    """Return the GiB per category that `profiler=memory` measured on a CPU at the peak; {} if not measured."""
    figures = row.counted[0].figures
    return {name: value for name in CATEGORIES if (value := figures.get(f"memory/live_{name}_gib")) is not None}


def predicted_memory(row: Row) -> dict[str, float]:
    """Return the predicted GiB per category at the peak of active memory; {} without a prediction."""
    categories = row.plan.get("memory/by_category_gib")
    return {str(name): number(each) or 0.0 for name, each in categories.items()} if isinstance(categories, dict) else {}

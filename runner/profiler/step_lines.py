"""Divides the time of traced steps into lines (kinds of work): `forward matmul`, `exposed all_gather over shard` and others.

Every moment of a step belongs to one line, so the lines add up to the time of the step. On CUDA, a moment in which the device
computes belongs to the kernel that began first, and a moment in which only collectives run is exposed communication. On a CPU,
the training thread's activity decides. A collective on another thread is exposed while the training thread runs no operator.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from meshrunner.runner.profiler.activities import (
    ANY_COLLECTIVE,
    EVALUATED,
    POINTWISE,
    STEP,
    Activity,
    Event,
    Span,
    Timeline,
    collective_of,
    cut,
)

OPTIMIZER, DATA, HOST, WAIT = "optimizer", "data", "host", "pipeline wait"
OPTIMIZER_HOST = "host in optimizer"
EXPOSED = "exposed "
"""Prefix of the lines of exposed communication."""
IDLE = (DATA, HOST, OPTIMIZER_HOST)
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


class Shares(NamedTuple):
    """Shares of the time of the profiled steps, in percent. The three shares add up to 100."""

    compute_pct: float
    exposed_comm_pct: float
    idle_pct: float


class Interval(NamedTuple):
    """A part of a step that belongs to one line, with times in microseconds."""

    begin: float
    end: float
    line: str
    module: str = ""
    """Name of the module that computes, or ""."""

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e6


class Step(NamedTuple):
    """A traced step: times in microseconds, and the training thread."""

    begin: float
    end: float
    updates_from: float
    """End of the last backward; without a backward, end of the step. Later work belongs to the optimizer."""
    thread: object
    dims: tuple[str, ...]
    """Names of the mesh dimensions over which ranks communicate, such as `shard`."""

    def line_of(self, activity: Activity, time: float) -> str:
        """Return the line to which an activity at the given time belongs."""
        updates = activity.part == "forward" and time >= self.updates_from
        if activity.part == "data":
            return DATA
        if activity.collective == "transfer":
            return WAIT
        if activity.collective:
            possible = self._dims_of(activity, updates=updates) or self.dims
            return f"{EXPOSED}{activity.collective}" + (f" over {possible[0]}" if len(possible) == 1 else "")
        if updates:
            return OPTIMIZER if activity.work else OPTIMIZER_HOST
        return f"{activity.part} {activity.work}" if activity.work else HOST

    def _dims_of(self, activity: Activity, *, updates: bool) -> list[str]:
        """Return the mesh dimensions over which a collective may communicate."""
        gathers = activity.collective in ("all_gather", "reduce_scatter")
        data = [each for each in self.dims if each == "shard" or (each == "replicate" and not gathers)]
        others = [each for each in self.dims if each not in ("replicate", "shard")]
        if activity.sharding:
            return data
        if updates:
            return list(self.dims)
        # Without `shard`, DDP reduces gradients over the data dimensions during backward.
        return [*data, *others] if activity.part == "backward" and "shard" not in self.dims else others


def divide(events: Iterable[Event], dims: tuple[str, ...] = ()) -> list[list[Interval]]:
    """Return the intervals of each step of a Chrome trace. The intervals of a step cover the whole step and do not overlap."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps, timeline = _steps(timed, dims), Timeline(timed)
    on_device = [event for event in timed if event.get("cat") in ON_DEVICE]
    return list(_on_device(steps, timed, on_device, timeline) if on_device else _on_cpu(steps, timed, timeline))


def seconds_by_line(steps: list[list[Interval]]) -> dict[str, list[float]]:
    """Return the seconds that a line takes in each step, keyed by line."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for i, intervals in enumerate(steps):
        for interval in intervals:
            found[interval.line][i] += interval.seconds
    return dict(found)


def seconds_by_module(steps: list[list[Interval]]) -> dict[str, float]:
    """Return the mean seconds of compute per step, keyed by module."""
    found: dict[str, float] = defaultdict(float)
    for interval in (interval for step in steps for interval in step if interval.module):
        if _is_compute(interval.line):
            found[interval.module] += interval.seconds / len(steps)
    return dict(found)


def shares(steps: list[list[Interval]], idle_lines: tuple[str, ...] = IDLE) -> Shares | None:
    """Return the shares of compute, communication and idle time over all steps, or None without steps."""
    seconds = {line: math.fsum(found) for line, found in seconds_by_line(steps).items()}
    if not (whole := math.fsum(seconds.values())):
        return None
    idle = 100 * math.fsum(each for line, each in seconds.items() if line in idle_lines) / whole
    computing = 100 * math.fsum(each for line, each in seconds.items() if _is_compute(line)) / whole
    return Shares(computing, 100 - computing - idle, idle)


def pipeline_idle_pct(steps: list[list[Interval]]) -> float:
    """Return the share of time in which a pipeline rank neither computes nor runs a collective, in percent; NaN without steps.
    Sends and receives count as idle, because the rank waits for another rank."""
    found = shares(steps, (*IDLE, WAIT))
    return math.nan if found is None else found.idle_pct


def _is_compute(line: str) -> bool:
    return line not in (*IDLE, WAIT) and not line.startswith(EXPOSED)


def _steps(timed: list[Event], dims: tuple[str, ...]) -> list[Step]:
    marked = [each for each in timed if each.get("cat") == "user_annotation" and each["name"].startswith(STEP)]
    ends = sorted(each["ts"] + each["dur"] for each in timed if each["name"].startswith(EVALUATED))
    steps = []
    for event in sorted(marked, key=itemgetter("ts")):
        begin, end = event["ts"], event["ts"] + event["dur"]
        last = ends[max(0, bisect_right(ends, end) - 1)] if ends else end
        steps.append(Step(begin, end, last if last > begin else end, event["tid"], dims))
    return steps


def _on_cpu(steps: list[Step], timed: list[Event], timeline: Timeline) -> Iterator[list[Interval]]:
    elsewhere = _apart(
        Span(each["ts"], each["ts"] + each["dur"], Activity(collective=collective_of(each["name"])))
        for each in timed
        if each["name"].startswith("gloo:")
    )
    for step in steps:
        found: list[Interval] = []
        for begin, end, activity in timeline.between(step.thread, step.begin, step.end):
            waits = not activity.work and activity.collective in ("", ANY_COLLECTIVE) and activity.part != "data"
            for first, last, other in cut(elsewhere if waits else [], begin, end, activity):
                line = step.line_of(activity._replace(collective=other.collective), first)
                found.append(Interval(first, last, line, activity.module))
        yield found


def _apart(spans: Iterable[Span]) -> list[Span]:
    """Sort spans by time and remove overlaps. If two spans overlap, the earlier one keeps the time that they share."""
    found: list[Span] = []
    for span in sorted(spans):
        begin = max(span.begin, found[-1].end) if found else span.begin
        if begin < span.end:
            found.append(span._replace(begin=begin))
    return found


def _on_device(
    steps: list[Step], timed: list[Event], on_device: list[Event], timeline: Timeline
) -> Iterator[list[Interval]]:
    """Divide steps into intervals of device work. A step ends when all work that it launched has ended. The next step begins
    no earlier."""
    launches = {_correlation(event): event for event in timed if event.get("cat") in LAUNCH}
    launched = [(launches.get(_correlation(event), event), event) for event in on_device]
    before = 0.0
    for step in steps:
        kernels = [_kernel(event, at, timeline, step) for at, event in launched if step.begin <= at["ts"] < step.end]
        last = max([step.end, before, *(kernel.end for kernel in kernels)])
        idle = [
            Interval(begin, end, step.line_of(activity._replace(work="", collective=""), begin))
            for begin, end, activity in timeline.between(step.thread, step.begin, step.end)
        ]
        yield list(_moments(kernels, idle, max(step.begin, before), last))
        before = last


def _correlation(event: Event) -> int:
    """Return the number that a kernel, copy or fill shares with its launch; -1 if unknown."""
    return int(event.get("args", {}).get("correlation", -1))


def _kernel(event: Event, launch: Event, timeline: Timeline, step: Step) -> Interval:
    activity, end = timeline.at(launch["tid"], launch["ts"]), event["ts"] + event["dur"]
    if event["cat"] == "kernel" and "nccl" in event["name"].lower():
        if activity.collective in ("", ANY_COLLECTIVE):  # an all-to-all consists of sends and receives
            activity = activity._replace(collective=collective_of(event["name"]))
        mesh, _, dim = event.get("args", {}).get("Process Group Description", "").partition("mesh_")
        if dim and not mesh:
            step = step._replace(dims=(dim,))
    else:
        activity = activity._replace(work=activity.work or POINTWISE, collective="")
    activity = activity._replace(part="forward" if activity.part == "data" else activity.part)  # a copy of the batch
    return Interval(event["ts"], end, step.line_of(activity, launch["ts"]), activity.module)


def _moments(kernels: list[Interval], idle: list[Interval], first: float, last: float) -> Iterator[Interval]:
    """Divide the time between `first` and `last`. idle: intervals of the thread that launches kernels. While no kernel runs,
    the line of the `idle` interval that began last applies."""
    changes: list[tuple[float, int, tuple[str, str]]] = [
        *((kernel.begin, 1, kernel[2:]) for kernel in kernels),
        *((kernel.end, -1, kernel[2:]) for kernel in kernels),
        *((each.begin, 0, each[2:]) for each in idle),
        (last, 0, (HOST, "")),
    ]
    running: dict[tuple[str, str], int] = {}
    """Number of running kernels, keyed by (line, module). Keys are in the order in which their first kernels began."""
    gap = (HOST, "")
    for (now, change, what), (later, _, _) in pairwise(sorted(changes, key=itemgetter(0))):
        if change:
            running[what] = running.get(what, 0) + change
            if not running[what]:
                del running[what]
        else:
            gap = what
        if (begin := max(now, first)) < later:
            computing = (each for each in running if _is_compute(each[0]))
            yield Interval(begin, later, *next(computing, next(iter(running), gap)))

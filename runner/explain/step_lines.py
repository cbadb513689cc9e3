"""Divides the time of traced steps into lines, such as `forward matmul` and `exposed all_gather`.

Every moment of a step belongs to one line, so the lines add up to the time of the step. On CUDA, a moment in which the device
computes belongs to the kernel that began first, and a moment in which only collectives run is exposed communication. On a CPU,
the training thread decides. A collective on another thread is exposed while the training thread runs no operator.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from meshrunner.runner.explain.activities import EVALUATED, POINTWISE, Activity, Timeline, collective_of
from meshrunner.runner.profiler.overlap import LAUNCH, ON_DEVICE, STEP, Event, correlation

OPTIMIZER, DATA, HOST, WAIT = "optimizer", "data", "host", "pipeline wait"
EXPOSED = "exposed "
"""Prefix of the lines of exposed communication."""
Interval = tuple[float, float, str]
"""(begin, end, line), with times in microseconds."""


Change = tuple[float, int, str]
"""(time, +1 or -1, line of a kernel that begins or ends), or (time, 0, line while no kernel runs)."""


class Step(NamedTuple):
    """A traced step: times in microseconds, and the training thread."""

    begin: float
    end: float
    updates_from: float
    """Time at which the last backward ends, or the end of a step without backward. What follows belongs to the optimizer."""
    thread: object


def seconds_by_line(events: Iterable[Event]) -> dict[str, list[float]]:
    """Return the seconds of each step of a Chrome trace, keyed by line; {} if the trace contains no steps."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = _steps(timed)
    found: dict[str, list[float]] = {}
    on_device = [event for event in timed if event.get("cat") in ON_DEVICE]
    timeline = Timeline(timed)
    divided = _on_device(steps, timed, on_device, timeline) if on_device else _on_cpu(steps, timed, timeline)
    for i, intervals in enumerate(divided):
        for begin, end, line in intervals:
            found.setdefault(line, [0.0] * len(steps))[i] += (end - begin) / 1e6
    return found


def _steps(timed: list[Event]) -> list[Step]:
    marked = [each for each in timed if each.get("cat") == "user_annotation" and each["name"].startswith(STEP)]
    ends = sorted(each["ts"] + each["dur"] for each in timed if each["name"].startswith(EVALUATED))
    steps = []
    for event in sorted(marked, key=itemgetter("ts")):
        begin, end = event["ts"], event["ts"] + event["dur"]
        last = ends[max(0, bisect_right(ends, end) - 1)] if ends else end
        steps.append(Step(begin, end, last if last > begin else end, event["tid"]))
    return steps


def line_of(activity: Activity, time: float, step: Step) -> str:
    """Return the line of an activity. Without an operator or a collective, it is HOST, except in the optimizer."""
    if activity.part == "data":
        return DATA
    if activity.collective:
        return _exposed(activity.collective)
    if activity.part == "forward" and time >= step.updates_from:
        return OPTIMIZER
    return f"{activity.part} {activity.work}" if activity.work else HOST


def _on_cpu(steps: list[Step], timed: list[Event], timeline: Timeline) -> Iterator[list[Interval]]:
    elsewhere = _apart(
        (each["ts"], each["ts"] + each["dur"], _exposed(collective_of(each["name"])))
        for each in timed
        if each["name"].startswith("gloo:")
    )
    for step in steps:
        found: list[Interval] = []
        for begin, end, activity in timeline.between(step.thread, step.begin, step.end):
            line = line_of(activity, begin, step)
            waits = not (activity.work or activity.collective) and line != DATA
            found += _divided(begin, end, line, elsewhere) if waits else [(begin, end, line)]
        yield found


def _exposed(collective: str) -> str:
    return WAIT if collective == "transfer" else EXPOSED + collective


def _apart(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals in the order of time without overlaps. The earlier of two keeps the time that they share."""
    found: list[Interval] = []
    for begin, end, line in sorted(intervals):
        begin = max(begin, found[-1][1]) if found else begin
        if begin < end:
            found.append((begin, end, line))
    return found


def _divided(begin: float, end: float, line: str, elsewhere: list[Interval]) -> Iterator[Interval]:
    """Divide an interval without operators among the collectives that run meanwhile. The remainder belongs to `line`."""
    now = begin
    for place in range(max(0, bisect_right(elsewhere, (begin,)) - 1), len(elsewhere)):
        first, after, other = elsewhere[place]
        if first >= end:
            break
        if after > now:
            if first > now:
                yield now, first, line
            yield max(first, now), min(after, end), other
            now = min(after, end)
    if now < end:
        yield now, end, line


def _on_device(
    steps: list[Step], timed: list[Event], on_device: list[Event], timeline: Timeline
) -> Iterator[Iterator[Interval]]:
    """Divide steps by the device's work. A step ends when all work that it launched has ended, and the next begins after that."""
    launches = {correlation(event): event for event in timed if event.get("cat") in LAUNCH}
    launched = [(launches.get(correlation(event), event), event) for event in on_device]
    before = 0.0
    for step in steps:
        changes: list[Change] = [
            (begin, 0, line_of(activity._replace(work="", collective=""), begin, step))
            for begin, _, activity in timeline.between(step.thread, step.begin, step.end)
        ]
        last = step.end
        for launch, event in launched:
            if step.begin <= launch["ts"] < step.end:
                end = event["ts"] + event["dur"]
                line = _line_of_kernel(event, launch, timeline, step)
                changes += [(event["ts"], 1, line), (end, -1, line)]
                last = max(last, end)
        first = max(step.begin, before)
        yield _moments(sorted([*changes, (last, 0, HOST)], key=itemgetter(0)), first)
        before = last


def _line_of_kernel(event: Event, launch: Event, timeline: Timeline, step: Step) -> str:
    activity = timeline.at(launch["tid"], launch["ts"])
    if event["cat"] == "kernel" and "nccl" in event["name"].lower():
        return _exposed(
            activity.collective or collective_of(event["name"])
        )  # an all-to-all consists of sends and receives
    return line_of(activity if activity.work else activity._replace(work=POINTWISE), launch["ts"], step)


def _moments(changes: list[Change], first: float) -> Iterator[Interval]:
    """Yield the intervals between changes, from the time `first` on."""
    running: dict[str, int] = {}
    """Number of running kernels per line, in the order in which the first of them began."""
    idle = HOST
    for (now, change, line), (later, _, _) in pairwise(changes):
        if change:
            running[line] = running.get(line, 0) + change
            if not running[line]:
                del running[line]
        else:
            idle = line
        if (begin := max(now, first)) < later:
            computing = (each for each in running if not each.startswith((EXPOSED, WAIT)))
            yield begin, later, next(computing, next(iter(running), idle))

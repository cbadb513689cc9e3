"""Shares of compute, exposed communication and idle time in profiled steps, from the intervals of a Chrome trace.

Each moment of a step is one of three: *compute* (something computes, whatever else happens), *exposed communication* (a
collective runs and nothing computes), *idle* (neither). They add up to the step.

On CUDA the device's events count. NCCL kernels are communication; all other kernels, copies and fills on any stream are
compute. An NCCL kernel runs from its launch on, so waiting for a slower rank is communication.

On a CPU there are no streams, only operators on threads (as seen in traces of DDP, FSDP1 and FSDP2 with gloo):

- Collectives appear as `gloo:all_gather` and the like on gloo's threads, from start to end, including the wait for slower
  ranks, and as `c10d::*` on the training thread while they are enqueued. Both, and copies inside them, are communication.
- Other operators (`aten::*`, `fsdp::*`, a user's own) and inductor's graphs are compute. Backward runs on the training thread.
- `work.wait()` has no event; the collective that runs meanwhile shows instead. Events of autograd and modules around operators
  (`autograd::*`, `MmBackward0`, `FSDP::pre_forward`) do not count, since they may enclose such a wait.
- Idle time is therefore Python code between two operators, and waiting for data.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

STEP = "meshrunner step "
"""Prefix of a step's annotation."""
Event = dict[str, Any]
Interval = tuple[float, float]
Intervals = list[Interval]
"""Pairs of begin and end in microseconds; results are disjoint and ordered."""

COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc):|_?c10d\w*::|record_param_comms$")
OPERATOR = re.compile(r"(?!autograd|torch)\w+::|## Call CompiledFxGraph")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


class Shares(NamedTuple):
    """Shares of the steps' time in percent, which add up to 100."""

    compute_pct: float
    exposed_comm_pct: float
    idle_pct: float


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the union of intervals."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def subtract(whole: Intervals, parts: Intervals) -> Intervals:
    """Return `whole` without `parts`; both must be disjoint and ordered."""
    left: Intervals = []
    first = 0
    for begin, end in whole:
        while first < len(parts) and parts[first][1] <= begin:
            first += 1
        i = first
        while i < len(parts) and parts[i][0] < end:
            if parts[i][0] > begin:
                left.append((begin, parts[i][0]))
            begin = parts[i][1]
            i += 1
        if begin < end:
            left.append((begin, end))
    return left


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of a and b; both must be disjoint and ordered."""
    return subtract(a, subtract(a, b))


def total_us(intervals: Intervals) -> float:
    """Return the total length of disjoint intervals in microseconds."""
    return sum(end - begin for begin, end in intervals)


def _span(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def shares(events: list[Event]) -> Shares | None:
    """Return the shares of the steps in a trace, or None if it has no step."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    annotated = [_span(e) for e in timed if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    on_device = [event for event in timed if event.get("cat") in ON_DEVICE]
    if on_device:
        steps = _steps_on_device(sorted(annotated), timed, on_device)
        compute = union(_span(event) for event in on_device if not _is_nccl(event))
        communication = union(_span(event) for event in on_device if _is_nccl(event))
    else:
        steps = union(annotated)
        compute, communication = _intervals_on_cpu(timed)
    total = total_us(steps)
    if not total:
        return None
    computing = 100 * total_us(intersect(steps, compute)) / total
    exposed = 100 * total_us(intersect(steps, subtract(communication, compute))) / total
    return Shares(computing, exposed, 100 - computing - exposed)


def _is_nccl(event: Event) -> bool:
    return event["cat"] == "kernel" and "nccl" in event["name"].lower()


def _steps_on_device(annotated: Intervals, timed: list[Event], on_device: list[Event]) -> Intervals:
    """
    Return the steps in device time, as the meter's CUDA events measure them.

    A step ends when all work launched in it has ended. It begins with its annotation, but not before the previous step has ended.
    Device events are matched to their launch on the host by correlation id.
    """
    launched = {_correlation(event): _span(event)[0] for event in timed if event.get("cat") in LAUNCH}
    ends = [(launched.get(_correlation(event), _span(event)[0]), _span(event)[1]) for event in on_device]
    steps: Intervals = []
    previous_end = 0.0
    for begin, end in annotated:
        last = max((ended for launch, ended in ends if begin <= launch < end), default=end)
        steps.append((max(begin, previous_end), max(last, end)))
        previous_end = steps[-1][1]
    return union(steps)


def _correlation(event: Event) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _intervals_on_cpu(timed: list[Event]) -> tuple[Intervals, Intervals]:
    """Return compute and communication on a CPU over all threads."""
    collectives: dict[Any, Intervals] = defaultdict(list)
    operators: dict[Any, Intervals] = defaultdict(list)
    for event in timed:
        if event.get("cat") not in ("cpu_op", "user_annotation"):
            continue
        if COLLECTIVE.match(event["name"]):
            collectives[event["tid"]].append(_span(event))
        elif event["cat"] == "cpu_op" and OPERATOR.match(event["name"]):
            operators[event["tid"]].append(_span(event))
    compute = union(
        span for thread, spans in operators.items() for span in subtract(union(spans), union(collectives[thread]))
    )
    return compute, union(span for spans in collectives.values() for span in spans)


def read_trace(path: Path) -> list[Event]:
    """Return the events of a gzipped Chrome trace."""
    with gzip.open(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events

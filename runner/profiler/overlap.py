"""Computes the shares of compute, exposed communication and idle time in profiled steps from a Chrome trace.

A moment of a step is *compute* if compute work runs, *exposed communication* if only a collective runs, and *idle* if neither
runs. The time in which a collective waits for a slower rank is communication.

On CUDA, NCCL kernels are communication. All other kernels, copies and fills on any stream are compute.

A CPU has no streams, only operators on threads. Communication is the time of `gloo:*` events, in which a gloo thread runs a
collective, and of `c10d::*` events, in which the training thread enqueues a collective. Copies inside `gloo:*` and `c10d::*`
events are communication, too. Other operators (such as `aten::*`, `fsdp::*` and a user's operators) and inductor's graphs are
compute. Events that enclose operators, such as `autograd::*`, `MmBackward0` and `FSDP::pre_forward`, are ignored, because such an
event may include calls of `work.wait()`, which a trace does not show.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

STEP = "meshrunner step "
"""Prefix of the annotation that marks a step in the trace."""
COMPUTE, COMMUNICATION, IDLE = "compute", "communication", "idle"
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc):|_?c10d\w*::|record_param_comms$")
TRANSFER = re.compile(r"gloo:(send|recv)|c10d::(send|recv_)$|ncclDevKernel_SendRecv")
"""Pattern of sends and receives. On GPUs, the kernel of an all-to-all has the same name."""
OPERATOR = re.compile(r"(?!autograd|torch)\w+::|## Call CompiledFxGraph")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]
Lane = tuple[str, Any]
"""A pair (kind, thread). The kind is STEP, COMPUTE or COMMUNICATION. On CUDA, all streams share one lane per kind."""
Span = tuple[Lane, float, float]
"""An interval (lane, begin, end) in which a lane is busy, with begin and end in microseconds."""


class Shares(NamedTuple):
    """Shares of the time of the profiled steps, in percent. The three shares add up to 100."""

    compute_pct: float
    exposed_comm_pct: float
    idle_pct: float


def shares(events: list[Event]) -> Shares | None:
    """Return the shares of compute, communication and idle time over all steps in a trace, or None if the trace has no steps."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_device = [event for event in timed if event.get("cat") in ON_DEVICE]
    steps = [each for each in timed if each.get("cat") == "user_annotation" and each["name"].startswith(STEP)]
    spans = list(_spans_on_device(steps, timed, on_device) if on_device else _spans_on_cpu(steps, timed))
    changes = [(begin, lane, 1) for lane, begin, _ in spans] + [(end, lane, -1) for lane, _, end in spans]
    changes.sort(key=itemgetter(0))
    busy: Counter[Lane] = Counter()
    spent = dict.fromkeys((COMPUTE, COMMUNICATION, IDLE), 0.0)
    for (now, lane, change), (later, _, _) in pairwise(changes):
        busy[lane] += change
        if later > now and busy[STEP, None]:
            spent[_activity(busy)] += later - now
    total = sum(spent.values())
    if not total:
        return None
    computing, exposed = 100 * spent[COMPUTE] / total, 100 * spent[COMMUNICATION] / total
    return Shares(computing, exposed, 100 - computing - exposed)


def pipeline_idle_pct(events: list[Event]) -> float:
    """Return the share of time in which a pipeline rank neither computes nor runs a collective, in percent; NaN without steps.
    Sends and receives count as idle, because the rank waits for another rank."""
    found = shares([event for event in events if not TRANSFER.match(event.get("name", ""))])
    return math.nan if found is None else found.idle_pct


def _activity(busy: Counter[Lane]) -> str:
    """Return COMPUTE, COMMUNICATION or IDLE for a moment. `busy` is the number of open spans in each lane."""
    lanes = [lane for lane, count in busy.items() if count]
    # An operator that runs inside a collective on the same thread counts as communication.
    if any(kind == COMPUTE and not busy[COMMUNICATION, thread] for kind, thread in lanes):
        return COMPUTE
    return COMMUNICATION if any(kind == COMMUNICATION for kind, _ in lanes) else IDLE


def _spans_on_device(steps: list[Event], timed: list[Event], on_device: list[Event]) -> Iterator[Span]:
    """Yield the spans of kernels, copies and fills (the device's work), and the spans of steps. A step ends when all device work
    that was launched in the step has ended. A step begins when its annotation begins, but not before the previous step ends."""
    launches: dict[int, float] = {correlation(event): event["ts"] for event in timed if event.get("cat") in LAUNCH}
    ends: list[tuple[float, float]] = []
    """(launch time, end time) of each kernel, copy and fill."""
    for event in on_device:
        kind = COMMUNICATION if event["cat"] == "kernel" and "nccl" in event["name"].lower() else COMPUTE
        _, begin, end = span = _span((kind, kind), event)
        yield span
        ends.append((launches.get(correlation(event), begin), end))
    previous_end = 0.0
    for _, begin, end in sorted(_span((STEP, None), event) for event in steps):
        last = max((ended for launch, ended in ends if begin <= launch < end), default=end)
        begin, previous_end = max(begin, previous_end), max(last, end, previous_end)
        yield (STEP, None), begin, previous_end


def _spans_on_cpu(steps: list[Event], timed: list[Event]) -> Iterator[Span]:
    for event in steps:
        yield _span((STEP, None), event)
    for event in timed:
        if event.get("cat") in ("cpu_op", "user_annotation") and COLLECTIVE.match(event["name"]):
            yield _span((COMMUNICATION, event["tid"]), event)
        elif event.get("cat") == "cpu_op" and OPERATOR.match(event["name"]):
            yield _span((COMPUTE, event["tid"]), event)


def _span(lane: Lane, event: Event) -> Span:
    return lane, event["ts"], event["ts"] + event["dur"]


def correlation(event: Event) -> int:
    """Return the number that a kernel, copy or fill shares with its launch; -1 if unknown."""
    return int(event.get("args", {}).get("correlation", -1))

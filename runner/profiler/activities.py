"""Classifies the events of a Chrome trace: which part of a step an event belongs to, and which kind of work it does."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

Event = dict[str, Any]
STEP = "meshrunner step "
"""Prefix of the annotation that marks a step in the trace."""
DATA = "meshrunner data"
"""Name of the annotation around the wait for a batch."""
MODULE = "meshrunner module "
"""Prefix of the annotation around the forward pass of a module, followed by the module's name."""
EVALUATED = "autograd::engine::evaluate_function: "
"""Prefix of the events in which autograd runs one backward function, and the hooks of this function's inputs and outputs."""
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc):|_?c10d\w*::|record_param_comms$")
TRANSFER = re.compile(r"gloo:(send|recv)|c10d::(send|recv_)$|ncclDevKernel_SendRecv")
"""Pattern of sends and receives. On GPUs, the kernel of an all-to-all also matches."""
SHARDS = re.compile(r"FSDP::|FullyShardedDataParallel\._")
"""Pattern of the events in which FSDP gathers, reduces or frees parameters or gradients."""
# Events like `autograd::*`, `MmBackward0` and `FSDP::pre_forward` are not operators: they enclose operators and unrecorded waits.
OPERATOR = re.compile(r"(?!autograd|torch)\w+::|## Call CompiledFxGraph")
WORK = {
    "experts": re.compile(r"grouped_mm"),
    "attention": re.compile(r"attention", re.IGNORECASE),
    "loss": re.compile(r"cross_entropy|log_softmax|nll_loss|logsumexp"),
    "matmul": re.compile(r"::(mm|bmm|addmm|baddbmm|matmul|linear|_scaled_mm\w*)$"),
}
"""Patterns of operators, keyed by kind of work. Operators that match no pattern are pointwise."""
POINTWISE, SHARDING = "pointwise", "sharding copies"
COLLECTIVES = {
    name: re.compile(name.replace("_", "_?"), re.IGNORECASE)
    for name in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
}
ANY_COLLECTIVE = "collective"


class Activity(NamedTuple):
    """The work that a thread does while one particular event is its innermost open event."""

    part: str = "forward"
    """`data`, `forward`, `recompute` or `backward`. The optimizer counts as forward here."""
    work: str = ""
    """Kind of compute; "" while no operator runs."""
    collective: str = ""
    """Kind of collective that runs, such as `all_gather`; `transfer` for a send or receive between pipeline stages."""
    sharding: bool = False
    """Whether FSDP gathers, reduces or frees parameters or gradients."""
    module: str = ""
    """Name of the module in whose forward pass the operator was called; "" if unknown."""

    def within(self, event: Event, modules: dict[int | None, str]) -> Self:
        """Return the activity inside `event`; `self` is the activity around `event`. modules: names of modules, keyed by the
        number that autograd gives to an operator and to its backward function. Forward operators are added to `modules`."""
        name, inside, number = event["name"], self, _number(event)
        if name == DATA:
            inside = self._replace(part="data")
        elif name.startswith(MODULE):
            inside = self._replace(module=name.removeprefix(MODULE))
        elif name.startswith(EVALUATED):
            inside = self._replace(part="backward", module=modules.get(number, ""))
        elif SHARDS.match(name):
            inside = self._replace(sharding=True)
        elif COLLECTIVE.match(name):
            kind = collective_of(name)
            if kind == ANY_COLLECTIVE:  # such as `record_param_comms` inside `c10d::send`
                kind = self.collective or kind
            inside = self._replace(collective=kind, work="")
        elif OPERATOR.match(name) and not self.collective:
            inside = self._computing(event)
        if number is not None and inside.module and inside.part == "forward":
            modules[number] = inside.module
        return inside

    def _computing(self, event: Event) -> Self:
        # Autograd numbers the operators that it records. In backward, it records only recomputed operators.
        recomputes = self.part == "backward" and not self.sharding and _number(event) is not None
        found = SHARDING if self.sharding else kind_of(event["name"])
        if self.work not in ("", POINTWISE):  # the outermost operator that is not pointwise decides the kind
            found = self.work
        return self._replace(work=found, part="recompute" if recomputes else self.part)


class Span(NamedTuple):
    """An interval of a thread, in microseconds, during which one event is the innermost open event."""

    begin: float
    end: float
    activity: Activity


def kind_of(operator: str) -> str:
    """Return the kind of work of an operator, such as `matmul` for `aten::mm`."""
    return next((kind for kind, pattern in WORK.items() if pattern.search(operator)), POINTWISE)


def collective_of(name: str) -> str:
    """Return the kind of a collective from the name of an event or kernel."""
    if TRANSFER.match(name):
        return "transfer"
    return next((kind for kind, pattern in COLLECTIVES.items() if pattern.search(name)), ANY_COLLECTIVE)


def _number(event: Event) -> int | None:
    """Return the number that autograd gives to an operator that it records, and to the operator's backward function."""
    number: int | None = event.get("args", {}).get("Sequence number")
    return number


def spans(events: Iterable[Event], modules: dict[int | None, str]) -> list[Span]:
    """Return the spans of one thread in chronological order, without the time in which no event is open."""
    found: list[Span] = []
    open_events: list[tuple[float, Activity]] = []
    """(end, activity inside) of each open event, the outermost first."""
    now = 0.0

    def until(time: float) -> None:
        nonlocal now
        if open_events and time > now:
            found.append(Span(now, time, open_events[-1][1]))
        now = max(now, time)

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_events and open_events[-1][0] <= begin:
            until(open_events[-1][0])
            open_events.pop()
        until(begin)
        around = open_events[-1][1] if open_events else Activity()
        open_events.append((end, around.within(event, modules)))
    while open_events:
        until(open_events[-1][0])
        open_events.pop()
    return found


def cut(found: list[Span], begin: float, end: float, otherwise: Activity) -> Iterator[Span]:
    """Yield the ordered spans from `begin` to `end`, cut at these times. Fill each gap with a span of activity `otherwise`."""
    now = begin
    for place in range(max(0, bisect_right(found, (begin,)) - 1), len(found)):
        span = found[place]
        if span.begin >= end:
            break
        if span.end <= now:
            continue
        if span.begin > now:
            yield Span(now, span.begin, otherwise)
            now = span.begin
        yield Span(now, min(span.end, end), span.activity)
        now = min(span.end, end)
    if now < end:
        yield Span(now, end, otherwise)


class Timeline:
    """The activities of all threads."""

    def __init__(self, timed: Iterable[Event]) -> None:
        threads: dict[Any, list[Event]] = {}
        for event in timed:
            if event.get("cat") in ("cpu_op", "user_annotation"):
                threads.setdefault(event["tid"], []).append(event)
        # Classify the training thread first, because autograd's threads run the backward functions of that thread's operators.
        trains = {thread: any(each["name"].startswith(STEP) for each in found) for thread, found in threads.items()}
        modules: dict[int | None, str] = {}
        self.threads = {
            thread: spans(threads[thread], modules) for thread in sorted(threads, key=trains.__getitem__, reverse=True)
        }

    def at(self, thread: Any, time: float) -> Activity:
        return next(self.between(thread, time, math.inf)).activity

    def between(self, thread: Any, begin: float, end: float) -> Iterator[Span]:
        """Yield the spans of a thread from `begin` to `end`, cut at these times. Fill each gap with a span that has no work."""
        return cut(self.threads.get(thread, []), begin, end, Activity())

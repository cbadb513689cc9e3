"""`compile.cuda_graph`: streams of a captured step begin and end with it, and its memory comes from a pool of its own."""

from __future__ import annotations

import pytest

from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator
from meshrunner.runner.predict.allocator.segments import MIB
from meshrunner.runner.predict.record.trace_events import (
    COMPUTE,
    CaptureBegan,
    Collective,
    EventRecorded,
    Operator,
    StreamWaitedForEvent,
    TraceEvent,
)
from meshrunner.runner.predict.replay.replay import InstantClock, replay
from tests.unit.predict.test_replay import AGAIN, FORWARD, Allocated, Freed, allocation
from tests.unit.predict.test_trace import traced

LAYOUTS = [
    "parallelism=fsdp2",
    "parallelism=fsdp2 parallelism.prefetch=2 activation_checkpoint=full loss=chunked loss.tokens=13",
    "parallelism=hsdp2",
    "parallelism=fsdp2 parallelism.reshard_after_forward=never model.tie_embeddings=true global_batch=4",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_of_a_captured_step_join_within_it(layout: str) -> None:
    events = traced(*layout.split(), "compile.cuda_graph=true").events
    captured = events[events.index(CaptureBegan()) + 1 :]
    assert unjoined(captured) == []


def unjoined(events: list[TraceEvent]) -> list[str]:
    """Return what CUDA rejects in a capture that begins on the compute stream."""
    found = []
    reached: dict[int, dict[int, int]] = {COMPUTE: {}}
    """For each stream of the capture, how much work of each stream it has waited for."""
    at_event: dict[int, dict[int, int]] = {}
    work: dict[int, int] = {}
    for event in events:
        if isinstance(event, Operator | Collective):
            if event.stream not in reached:
                found.append(f"stream {event.stream} works before it has waited for the capture")
            work[event.stream] = work.get(event.stream, 0) + 1
            reached.setdefault(event.stream, {})[event.stream] = work[event.stream]
        elif isinstance(event, EventRecorded) and event.stream in reached:
            at_event[event.event] = {**reached[event.stream]}
        elif isinstance(event, StreamWaitedForEvent):
            if event.event not in at_event:
                found.append(f"stream {event.stream} waits for event {event.event} from outside of the capture")
            known = reached.setdefault(event.stream, {})
            for stream, number in at_event.get(event.event, {}).items():
                known[stream] = max(number, known.get(stream, 0))
    return found + [f"stream {each} does not join" for each in work if reached[COMPUTE].get(each) != work[each]]


def test_events_from_outside_are_found() -> None:
    work = Operator("aten::mm", "matmul", 1, FORWARD, 0, "bfloat16", 0)
    assert unjoined([StreamWaitedForEvent(1, 7), work]) == [
        "stream 1 waits for event 7 from outside of the capture",
        "stream 1 does not join",
    ]
    assert unjoined([EventRecorded(7, COMPUTE), StreamWaitedForEvent(1, 7), work]) == ["stream 1 does not join"]
    joined = [EventRecorded(7, COMPUTE), StreamWaitedForEvent(1, 7), work, EventRecorded(8, 1)]
    assert unjoined([*joined, StreamWaitedForEvent(COMPUTE, 8)]) == []


@pytest.mark.parametrize("expandable", [False, True])
def test_a_graph_does_not_use_memory_that_others_have_cached(expandable: bool) -> None:
    held, cached, own = allocation(4), allocation(8), allocation(8, AGAIN)
    begin = [Allocated(held), Allocated(cached), Freed(cached)]
    eager, captured = (
        replay([*begin, *between, Allocated(own)], InstantClock(), CachingAllocator(None, expandable=expandable))
        for between in ([], [CaptureBegan()])
    )
    assert eager.peak_reserved == 20 * MIB and captured.peak_reserved == 40 * MIB
    assert eager.peak == captured.peak

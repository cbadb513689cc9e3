"""The clock of a log, against timelines computed by hand."""

from __future__ import annotations

import time

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.hardware import GPU, Efficiency, PeakFlops
from meshrunner.runner.ledger.allocations import Allocation, Phase
from meshrunner.runner.predict.record.trace_events import (
    Allocated,
    Collective,
    EventRecorded,
    Freed,
    HostWaited,
    Operator,
    StreamWaitedForEvent,
    TraceEvent,
)
from meshrunner.runner.predict.timing.rates import GPURates
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock

FORWARD, NORM, OPTIMIZER = Phase(0, "forward", 0), Phase(0, "update"), Phase(0, "optimizer")
COPY, NETWORK, OTHER = 1, 2, 3


def gpu(**changed: float) -> GPU:
    """Round figures: products 100 TFLOP/s in bf16, memory 1 TB/s, an all-gather between two 537 GB/s and 8 microseconds."""
    efficiency = {"matmul": 0.5, "attention": 0.25, "attention_backward": 0.125, "memory": 0.5}
    efficiency |= {"contention": 0.0, "kernel_s": 0.0, "host_s": 0.0} | changed
    return GPU(
        kind="gpu",
        name="Round",
        match="Round",
        memory_gib=80,
        peak=PeakFlops(fp32=50, tf32=100, bf16=200, fp8=None),
        memory_bandwidth=2000,
        link_bandwidth=450,
        network_bandwidth=50,
        devices_per_node=8,
        reserved_elsewhere_gib=1,
        efficiency=Efficiency(**efficiency),
    )


def product(
    ms: float, stream: int = 0, dtype: str = "bfloat16", kind: str = "matmul", phase: Phase = FORWARD
) -> Operator:
    """A product that takes so long in bf16."""
    return Operator("aten::mm", kind, stream, phase, round(ms * 1e11), dtype, 1000)


def copy(ms: float, stream: int = 0, phase: Phase = FORWARD) -> Operator:
    return Operator("aten::copy_", "memory", stream, phase, 0, "float32", round(ms * 1e9))


def gather(ms: float, stream: int = NETWORK, ranks: tuple[int, ...] = (0, 1)) -> Collective:
    """An all-gather that takes so long between two of a node."""
    return Collective("all_gather", stream, FORWARD, ranks, round((ms * 1e-3 - 8e-6) * 537e9))


def clock(*entries: TraceEvent, **efficiency: float) -> SimulatedClock:
    made = SimulatedClock(GPURates(gpu(**efficiency), "tf32", 8))
    for entry in entries:
        made.take(entry)
    return made


def waited(stream: int, other: int) -> tuple[TraceEvent, TraceEvent]:
    """A stream waits for all work issued so far to another, as `Stream.wait_stream` records it."""
    return EventRecorded(99, other), StreamWaitedForEvent(stream, 99)


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (product(3), 3),
        (product(3, dtype="float16"), 3),
        (product(3, dtype="float32"), 6),
        (product(3, dtype="float64"), 24),
        (product(3, kind="attention"), 6),
        (product(3, kind="attention_backward"), 12),
        (copy(3), 3),
        (Operator("aten::mm", "matmul", 0, FORWARD, 10**11, "bfloat16", 4 * 10**9), 4),
        (Operator("aten::mul", "memory", 0, FORWARD, 10**15, "int64", 10**9), 1),
    ],
)
def test_an_operator_takes_its_arithmetic_or_its_traffic(operator: Operator, expected: float) -> None:
    assert ms(clock(operator).done_at(0)) == expected
    assert ms(clock(operator, kernel_s=1e-4).done_at(0)) == expected + 0.1


def test_fp32_matmuls_use_the_given_rate() -> None:
    exact = SimulatedClock(GPURates(gpu(), "fp32", 8))
    exact.take(product(3, dtype="float32"))
    assert ms(exact.done_at(0)) == 12


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("float8_e4m3fn", r"hardware\.peak\.fp8 of Round is not known"), ("int8", "the rate of .* in int8 is not known")],
)
def test_unknown_rate_is_reported(dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        clock(product(1, dtype=dtype))


def test_streams_run_concurrently_and_in_order() -> None:
    run = clock(product(2), copy(3, COPY), product(2), copy(1, COPY))
    assert (ms(run.done_at(0)), ms(run.done_at(COPY)), run.done_at(OTHER)) == (4, 4, 0)


def test_a_stream_waits_for_an_event() -> None:
    """As it stood when the event was recorded, not for what came later; a new recording replaces it."""
    before = (product(2), EventRecorded(7, 0), product(5), StreamWaitedForEvent(COPY, 7), copy(1, COPY))
    assert ms(clock(*before).done_at(COPY)) == 3
    assert ms(clock(*before, EventRecorded(7, 0), StreamWaitedForEvent(COPY, 7), copy(1, COPY)).done_at(COPY)) == 8
    assert ms(clock(*before, EventRecorded(8, COPY), StreamWaitedForEvent(0, 8), product(1)).done_at(0)) == 8
    assert ms(clock(product(2), StreamWaitedForEvent(COPY, 9), copy(1, COPY)).done_at(COPY)) == 1


def test_a_stream_waits_for_another() -> None:
    run = clock(product(2), *waited(COPY, 0), product(5), copy(1, COPY), *waited(0, COPY))
    assert (ms(run.done_at(0)), ms(run.done_at(COPY))) == (7, 3)


def test_the_host_waits() -> None:
    one = (product(2), EventRecorded(1, 0), product(3), copy(9, COPY))
    assert ms(clock(*one).host) == 0
    assert ms(clock(*one, HostWaited(1)).host) == 2
    assert ms(clock(*one, HostWaited(None)).host) == 9
    assert ms(clock(*one, HostWaited(None), product(1)).done_at(0)) == 10
    assert ms(clock(*one, HostWaited(None), HostWaited(1)).host) == 9
    assert ms(clock(*one, HostWaited(5)).host) == 0


def test_device_waits_for_a_slow_host() -> None:
    run = clock(*[product(0.1)] * 10, host_s=1e-3)
    assert (ms(run.host), ms(run.done_at(0))) == (10, 10.1)
    timed = run.step_time()
    assert (ms(timed.seconds), ms(timed.seconds_by_part["matmul"]), timed.exposed_communication_s) == (10.1, 1, 0)
    run = clock(*[product(2)] * 10, host_s=1e-3)
    assert (ms(run.host), ms(run.done_at(0))) == (10, 21)
    assert ms(clock(gather(2), gather(2), host_s=1e-3).host) == 2


def test_collectives_of_one_group_run_one_after_another() -> None:
    """FSDP's all-gathers and reduce-scatters are issued to two streams, but are of one communicator."""
    run = clock(gather(2), gather(3, OTHER), gather(1))
    assert (ms(run.done_at(NETWORK)), ms(run.done_at(OTHER))) == (6, 5)
    run = clock(gather(2), gather(3, OTHER, (0, 4)), gather(1))
    assert (ms(run.done_at(NETWORK)), ms(run.done_at(OTHER))) == (3, 3)
    run = clock(gather(2), gather(3, NETWORK, (0, 4)))
    assert ms(run.done_at(NETWORK)) == 5


def test_a_queue_waits_for_the_collective_in_front() -> None:
    """The first of a group waits for compute, and what another stream has of the group for it."""
    run = clock(product(5), *waited(NETWORK, 0), gather(2), gather(1, OTHER))
    assert (ms(run.done_at(NETWORK)), ms(run.done_at(OTHER))) == (7, 8)


def prefetching() -> list[TraceEvent]:
    """Two blocks: the second is gathered while the first computes; compute waits 2 ms for the first and 1 for the second."""
    return [
        gather(2),
        EventRecorded(1, NETWORK),
        StreamWaitedForEvent(0, 1),
        gather(5),
        EventRecorded(2, NETWORK),
        product(4),
        StreamWaitedForEvent(0, 2),
        product(4),
    ]


def test_exposed_communication() -> None:
    timed = clock(*prefetching()).step_time()
    assert (ms(timed.seconds), ms(timed.exposed_communication_s)) == (11, 3)
    assert ms(timed.seconds_by_part["communication"]) == 7
    timed = clock(gather(5), copy(4, COPY)).step_time()  # copies beside the stream of compute hide nothing
    assert (ms(timed.seconds), ms(timed.exposed_communication_s)) == (5, 5)


def test_overlapped_communication_slows_compute() -> None:
    timed = clock(*prefetching(), contention=0.25).step_time()
    assert (ms(timed.seconds), ms(timed.exposed_communication_s)) == (12, 3)
    assert ms(clock(gather(2), *waited(0, NETWORK), product(3), contention=0.25).step_time().seconds) == 5


def test_parts_of_a_step() -> None:
    timed = clock(
        product(1),
        product(2, kind="attention"),
        product(1, kind="attention_backward"),
        copy(7),
        copy(1, COPY),
        copy(2, phase=NORM),
        product(3, phase=OPTIMIZER),
        gather(6),
    ).step_time()
    assert {name: ms(each) for name, each in timed.seconds_by_part.items()} == {
        "matmul": 1,
        "attention": 2 * 2 + 4,
        "memory": 8,
        "optimizer": 5,
        "communication": 6,
    }
    assert (ms(timed.seconds), timed.exposed_communication_s) == (21, 0)


def test_steps_are_timed_separately() -> None:
    """A step lasts from the end of the work before it to the end of its own, however far ahead the host issues it."""
    run = clock(product(10), gather(30))
    for _ in range(2):
        run.begin_step()
        for entry in (*waited(0, NETWORK), product(3), gather(1), *waited(NETWORK, 0)):
            run.take(entry)
        timed = run.step_time()
        assert (ms(timed.seconds), ms(timed.seconds_by_part["matmul"])) == (3, 3)
        assert ms(timed.seconds_by_part["communication"]) == 1


def test_matmuls_hide_all_but_one_piece_of_tensor_parallel_collectives() -> None:
    def took(*entries: TraceEvent, ranks: tuple[int, ...] = (2, 3)) -> float:
        run = SimulatedClock(GPURates(gpu(), "tf32", 8), tensor=2)
        (gathered,) = (each for each in entries if isinstance(each, Collective))
        for entry in entries:
            if isinstance(entry, Collective):
                for event in (*waited(NETWORK, 0), gathered._replace(ranks=ranks), *waited(0, NETWORK)):
                    run.take(event)
            else:
                run.take(entry)
        return ms(run.done_at(0))

    scatter, add = gather(4)._replace(name="reduce_scatter"), copy(1)
    cat = add._replace(name="fused::cat", nbytes=2 * scatter.nbytes)
    ordered, summed = ms(cat.nbytes / 1e12), cat._replace(nbytes=3 * scatter.nbytes)
    assert took(gather(4), product(3)) == 5 and took(product(3), scatter) == 5
    assert took(gather(4), product(1), product(0.5), product(7)) == 10.5
    assert took(product(1), scatter) == 4
    assert took(gather(4), cat, product(3)) == pytest.approx(5 + ordered)
    assert took(product(3), cat, scatter) == pytest.approx(5 + ordered)
    assert took(product(3), summed, scatter) == pytest.approx(7 + 1.5 * ordered), "torch fuses no sum of matmuls"
    assert took(product(3), add, scatter) == 8 and took(gather(4), product(1), add, product(7)) == 12
    assert took(gather(4), product(3), ranks=(2, 4)) == 7


def test_a_hundred_thousand_entries_take_less_than_a_second() -> None:
    """A step of a model with 7 billion parameters; CPU time, and generous for a busy machine."""
    allocation = Allocation(512, "temporary", FORWARD, 0, 0)
    ranks = tuple(range(4096))
    block = [
        Allocated(allocation),
        product(1),
        EventRecorded(1, 0),
        StreamWaitedForEvent(COPY, 1),
        copy(1, COPY),
        Freed(allocation),
    ] * 100
    log: list[TraceEvent] = ([*block, *[gather(1, ranks=ranks)] * 6]) * 165
    run = SimulatedClock(GPURates(gpu(), "tf32", 8))
    began = time.process_time()
    for entry in log:
        run.take(entry)
    assert len(log) == 99_990
    assert time.process_time() - began < 1


def test_a_collective_of_known_bytes_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def seconds(rates: GPURates, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        computed.append(nbytes)
        return 1.0

    monkeypatch.setattr(GPURates, "collective_s", seconds)
    repeated = [gather(1), gather(2), gather(1), gather(1, ranks=(0, 4)), gather(2)]
    assert clock(*repeated).done_at(NETWORK) == 5
    assert computed == [repeated[0].nbytes, repeated[1].nbytes, repeated[3].nbytes]

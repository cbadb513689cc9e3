"""Shares of compute, exposed communication and idle time, from hand-made events."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshrunner.runner.profiler import step_lines
from meshrunner.runner.profiler.activities import STEP, Event
from meshrunner.runner.profiler.step_lines import Shares, divide

TRAINING, GLOO = 1, 2
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def event(name: str, begin: float, end: float, thread: int = TRAINING, cat: str = "cpu_op", **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": args}


def step(number: int, begin: float, end: float) -> Event:
    return event(f"{STEP}{number}", begin, end, cat="user_annotation")


def kernel(name: str, begin: float, end: float, stream: int, launched: float) -> list[Event]:
    """Return a kernel and the call that launched it, which share a correlation id."""
    identity = int(begin * 1000 + stream)
    call = event("cudaLaunchKernel", launched, launched + 0.1, cat="cuda_runtime", correlation=identity)
    return [call, event(name, begin, end, stream, cat="kernel", correlation=identity)]


def shares(events: list[Event]) -> Shares | None:
    return step_lines.shares(divide(events))


def pipeline_idle_pct(events: list[Event]) -> float:
    return step_lines.pipeline_idle_pct(divide(events))


def test_overlapping_and_adjacent_operators_count_once() -> None:
    spans = [(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]
    assert shares([step(1, 0, 10), *(event("aten::mm", *span) for span in spans)]) == pytest.approx((50, 0, 50))


def test_operator_around_collectives_is_compute_between_them() -> None:
    collectives = [event("c10d::x", *span) for span in ((0, 1), (2, 3), (9, 20))]
    assert shares([step(1, 0, 20), event("mine::all", 0, 20), *collectives]) == pytest.approx((35, 65, 0))


def test_collective_on_a_cpu_is_exposed_where_no_operator_runs() -> None:
    events = [
        step(1, 0, 100),
        event("aten::mm", 10, 40),
        event("gloo:all_gather", 30, 60, GLOO, "user_annotation"),
        event("aten::mm", 55, 80),
    ]
    assert shares(events) == pytest.approx((55, 15, 30))


def test_events_that_enclose_a_wait_are_not_compute() -> None:
    """FSDP waits in a hook inside a node of autograd's graph."""
    events = [
        step(1, 0, 10),
        event(BACKWARD, 0, 10),
        event("RegisterPostBackwardFunctionBackward", 0, 10),
        event("torch::autograd::AccumulateGrad", 0, 10),
        event("FSDP::post_backward_reduce", 0, 10, cat="user_annotation"),
        event("aten::mm", 0, 4),
        event("gloo:all_reduce", 4, 9, GLOO, "user_annotation"),
    ]
    assert shares(events) == pytest.approx((40, 50, 10))


@pytest.mark.parametrize("name", ["c10d::_allgather_base_", "_c10d_functional::wait_tensor", "record_param_comms"])
def test_operators_inside_a_collective_are_communication(name: str) -> None:
    """On a CPU, only the training thread's operators are compute."""
    events = [step(1, 0, 10), event(name, 0, 5), event("aten::copy_", 1, 4)]
    assert shares(events) == pytest.approx((0, 50, 50))
    assert shares([*events, event("aten::mm", 2, 4, thread=7)]) == pytest.approx((0, 50, 50))


def test_compiled_code_and_own_operators_are_compute() -> None:
    graph = event("## Call CompiledFxGraph fabc ##", 0, 4)
    assert shares([step(1, 0, 10), graph, event("mine::kernel", 4, 6)]) == pytest.approx((60, 0, 40))


def test_time_between_steps_does_not_count() -> None:
    operators = [event("aten::mm", *span) for span in ((5, 10), (10, 20), (20, 25))]
    events = [step(1, 0, 10), *operators, step(2, 20, 30), event("gloo:x", 12, 22, GLOO)]
    assert shares(events) == pytest.approx((50, 0, 50))


def test_kernels_overlap_across_streams() -> None:
    """On two streams, a gather is hidden behind a matmul for 20 of its 40. Operators of the host do not count."""
    events = [
        step(1, 0, 100),
        event("aten::mm", 0, 100),
        *kernel("ampere_sgemm_128x64", 10, 50, stream=7, launched=5),
        *kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 30, 70, stream=20, launched=6),
        event("Memcpy HtoD", 75, 80, 7, "gpu_memcpy", correlation=1),
    ]
    assert shares(events) == pytest.approx((45, 20, 35))


def test_a_pipeline_rank_idles_while_it_only_sends_or_receives() -> None:
    transfers = [
        *kernel("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 0, 60, stream=20, launched=1),
        *kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 80, 90, stream=21, launched=2),
    ]
    events = [step(1, 0, 100), *kernel("ampere_sgemm_128x64", 10, 50, stream=7, launched=5)]
    assert pipeline_idle_pct([*events, *transfers]) == pytest.approx(50)
    assert math.isnan(pipeline_idle_pct(events[1:]))
    on_cpu = [step(1, 0, 10), event("aten::mm", 0, 4), event("gloo:recv", 3, 8, thread=2), event("c10d::send", 8, 9)]
    assert pipeline_idle_pct(on_cpu) == pytest.approx(60)


def test_step_on_the_device_ends_with_the_work_launched_in_it() -> None:
    """The host runs ahead: it has issued step 1 by 10 and step 2 by 20. The device needs 30 for each."""
    events = [
        step(1, 0, 10),
        step(2, 10, 20),
        *kernel("gemm", 2, 32, stream=7, launched=1),
        *kernel("gemm", 32, 52, stream=7, launched=11),
        *kernel("nccl:all_reduce", 52, 62, stream=8, launched=12),
    ]
    found = shares(events)
    assert found == pytest.approx((100 * 50 / 62, 100 * 10 / 62, 100 * 2 / 62))


def test_gap_between_two_steps_on_the_device_does_not_count() -> None:
    events = [
        step(1, 0, 10),
        *kernel("gemm", 0, 20, stream=7, launched=1),
        step(2, 50, 60),
        *kernel("gemm", 55, 90, stream=7, launched=55),
    ]
    assert shares(events) == pytest.approx((100 * 55 / 60, 0, 100 * 5 / 60))


def test_trace_without_a_step_has_no_shares() -> None:
    assert shares([event("aten::mm", 0, 1)]) is None
    assert shares([*kernel("gemm", 0, 1, 7, 0)]) is None

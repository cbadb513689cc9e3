"""Lines of a step from hand-made traces of a CPU and of a GPU."""

from __future__ import annotations

import math

import pytest

from meshrunner.runner.profiler import step_lines
from meshrunner.runner.profiler.activities import DATA as DATA_MARK
from meshrunner.runner.profiler.activities import MODULE, Event
from meshrunner.runner.profiler.step_lines import DATA, HOST, OPTIMIZER, OPTIMIZER_HOST, WAIT, divide
from tests.unit.profiler.test_shares import GLOO, event, kernel, step

NODE = "autograd::engine::evaluate_function: MmBackward0"
SECOND = 1e6
"""Traces count microseconds."""


def mark(name: str, begin: float, end: float) -> Event:
    return event(name, begin, end, cat="user_annotation")


def seconds_by_line(events: list[Event]) -> dict[str, list[float]]:
    return step_lines.seconds_by_line(divide(events))


def lines(events: list[Event]) -> dict[str, float]:
    """Return the microseconds per line of the only step."""
    return {line: SECOND * seconds for line, (seconds,) in seconds_by_line(events).items()}


def test_a_step_on_a_cpu_is_divided_without_remainder() -> None:
    recorded = {"Sequence number": 7}
    events = [
        step(1, 0, 100),
        mark(DATA_MARK, 0, 5),
        event("aten::linear", 5, 15, **recorded),
        event("aten::addmm", 6, 14),
        event("aten::mul", 15, 18, **recorded),
        mark("FSDP::pre_forward", 18, 30),
        event("fsdp::all_gather_copy_in", 18, 20),
        event("c10d::_allgather_base_", 20, 22),
        event("gloo:all_gather", 20, 28, GLOO, "user_annotation"),
        event("aten::scaled_dot_product_attention", 30, 36, **recorded),
        event(NODE, 40, 80),
        event("MmBackward0", 40, 75),
        event("aten::mm", 40, 50, **recorded),
        event("aten::mm", 50, 70),
        event("aten::add", 75, 78),
        event("Optimizer.step#AdamW.step", 85, 95, cat="user_annotation"),
        event("aten::_fused_adamw_", 86, 94),
    ]
    found = lines(events)
    assert math.fsum(found.values()) == pytest.approx(100)
    assert found == pytest.approx(
        {
            DATA: 5,
            "forward matmul": 10,
            "forward pointwise": 3,
            "forward sharding copies": 2,
            "exposed all_gather": 8,
            "forward attention": 6,
            "recompute matmul": 10,
            "backward matmul": 20,
            "backward pointwise": 3,
            OPTIMIZER: 8,
            OPTIMIZER_HOST: 12,
            HOST: 13,
        }
    )


def test_work_after_the_last_backward_is_the_optimizer() -> None:
    events = [
        step(1, 0, 50),
        event("aten::mm", 0, 10),
        event(NODE, 10, 20),
        event("aten::mm", 20, 30),
        event(NODE, 30, 40),
        event("aten::linalg_vector_norm", 40, 45),
    ]
    assert lines(events) == pytest.approx({"forward matmul": 20, OPTIMIZER: 5, OPTIMIZER_HOST: 5, HOST: 20})


def test_a_wait_for_gradients_after_backward_is_communication() -> None:
    """DDP waits for its all-reduces when backward has ended."""
    events = [
        step(1, 0, 50),
        event(NODE, 0, 20),
        event("gloo:all_reduce", 15, 35, GLOO, "user_annotation"),
        event("gloo:all_reduce", 30, 38, GLOO, "user_annotation"),
        event("aten::_fused_adamw_", 40, 45),
    ]
    assert lines(events) == pytest.approx({HOST: 15, "exposed all_reduce": 23, OPTIMIZER: 5, OPTIMIZER_HOST: 7})


def test_a_transfer_between_stages_is_a_wait() -> None:
    events = [step(1, 0, 10), event("c10d::recv_", 2, 8), event("gloo:recv", 3, 8, GLOO, "user_annotation")]
    assert lines(events) == pytest.approx({WAIT: 6, HOST: 4})


def test_collectives_are_named_by_the_dimensions_of_the_mesh() -> None:
    events = [
        step(1, 0, 100),
        mark("FSDP::pre_forward", 0, 10),
        event("gloo:all_gather", 2, 8, GLOO, "user_annotation"),
        event("_c10d_functional::all_reduce", 10, 12),
        event("_c10d_functional::wait_tensor", 20, 30),
        event("gloo:all_reduce", 10, 28, GLOO, "user_annotation"),
        event(NODE, 40, 60),
        event("_c10d_functional::all_reduce", 70, 80),
    ]
    found = step_lines.seconds_by_line(divide(events, ("replicate", "shard", "tensor")))
    assert {line: SECOND * seconds for line, (seconds,) in found.items()} == pytest.approx(
        {
            "exposed all_gather over shard": 6,
            "exposed all_reduce over tensor": 18,
            "exposed collective over tensor": 2,
            "exposed all_reduce": 10,
            HOST: 34,
            OPTIMIZER_HOST: 30,
        }
    )
    gathers = kernel("ncclDevKernel_AllGather_RING_LL", 2, 8, 21, launched=1)
    gathers[1]["args"]["Process Group Description"] = "mesh_shard"
    found = step_lines.seconds_by_line(divide([step(1, 0, 10), *gathers], ("replicate", "tensor")))
    assert found["exposed all_gather over shard"] == pytest.approx([6 / SECOND])


def test_an_all_reduce_that_may_be_ddps_has_no_dimension() -> None:
    events = [step(1, 0, 20), event(NODE, 0, 10), event("gloo:all_reduce", 2, 8, GLOO, "user_annotation")]
    assert "exposed all_reduce" in step_lines.seconds_by_line(divide(events, ("replicate", "tensor")))
    assert "exposed all_reduce over replicate" in step_lines.seconds_by_line(divide(events, ("replicate",)))
    assert "exposed all_reduce over tensor" in step_lines.seconds_by_line(divide(events, ("shard", "tensor")))


def test_nccl_events_inside_a_collective_do_not_rename_it() -> None:
    def inside(name: str, begin: float, end: float) -> list[Event]:
        return [event(name, begin, end), event("record_param_comms", begin, end), event("nccl:x 0->1", begin, end)]

    events = [
        step(1, 0, 100),
        *inside("c10d::send", 0, 2),
        *kernel("ncclDevKernel_SendRecv", 10, 60, 21, launched=1),
        *inside("c10d::_allgather_base_", 2, 4),
        *kernel("ncclDevKernel_AllGather_RING_LL", 60, 70, 21, launched=3),
        event("record_param_comms", 4, 6),  # coalesced sends
        *kernel("ncclDevKernel_SendRecv", 70, 80, 22, launched=5),
    ]
    assert lines(events) == pytest.approx({HOST: 30, WAIT: 60, "exposed all_gather": 10})


def test_a_copy_of_the_batch_is_compute() -> None:
    copy = event("Memcpy HtoD", 2, 7, 7, "gpu_memcpy", correlation=1)
    launch = event("cudaMemcpyAsync", 1, 2, cat="cuda_runtime", correlation=1)
    events = [step(1, 0, 10), mark(DATA_MARK, 0, 5), launch, copy]
    assert lines(events) == pytest.approx({"forward pointwise": 5, DATA: 2, HOST: 3})


def test_modules_are_followed_into_backward() -> None:
    events = [
        step(1, 0, 100),
        mark(f"{MODULE}blocks.0", 0, 20),
        mark(f"{MODULE}blocks.0.wq", 2, 12),
        event("aten::mm", 2, 10, **{"Sequence number": 3}),
        event("aten::add", 15, 17, **{"Sequence number": 4}),
        event(f"{NODE}", 20, 22, **{"Sequence number": 4}),
        event("aten::add", 20, 22),
        event(f"{NODE}", 30, 50, **{"Sequence number": 3}),
        mark(f"{MODULE}blocks.0.wq", 30, 35),
        event("aten::mm", 30, 34, **{"Sequence number": 7}),
        event("aten::mm", 36, 46),
        event("aten::_fused_adamw_", 60, 70),
    ]
    found = step_lines.seconds_by_module(divide(events))
    assert {name: SECOND * seconds for name, seconds in found.items()} == pytest.approx(
        {"blocks.0": 4, "blocks.0.wq": 22}
    )
    assert lines(events)["recompute matmul"] == pytest.approx(4)


def test_each_step_has_its_own_seconds() -> None:
    events = [step(1, 0, 10), event("aten::mm", 0, 4), step(2, 10, 30), event("aten::add", 10, 20)]
    found = {line: [SECOND * each for each in seconds] for line, seconds in seconds_by_line(events).items()}
    assert found == {
        "forward matmul": pytest.approx([4, 0]),
        "forward pointwise": pytest.approx([0, 10]),
        HOST: pytest.approx([6, 10]),
    }


def test_on_a_gpu_kernels_count_from_the_end_of_the_step_before() -> None:
    """The last kernel of the first step runs until 14, after the second step has been issued."""
    autograd = 5
    events = [
        step(1, 0, 10),
        event("aten::mm", 0, 2),
        *kernel("gemm", 1, 6, 20, launched=0.5),
        event(NODE, 2, 8, autograd),
        event("aten::mm", 2, 4, autograd, **{"Sequence number": 3}),
        event("aten::mm", 4, 6, autograd),
        *(
            each | {"tid": autograd} if each["cat"] == "cuda_runtime" else each
            for each in kernel("gemm", 6, 8, 20, 2.5)
        ),
        *(
            each | {"tid": autograd} if each["cat"] == "cuda_runtime" else each
            for each in kernel("gemm", 8, 14, 20, 4.5)
        ),
        *kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 7, 9, 21, launched=5.5),
        step(2, 10, 20),
        *kernel("ncclDevKernel_AllGather_RING_LL", 13, 18, 21, launched=11),
        event("aten::mul", 12, 13),
        *kernel("elementwise", 19, 20, 20, launched=12.5),
    ]
    found = {line: [SECOND * each for each in seconds] for line, seconds in seconds_by_line(events).items()}
    assert found == {
        HOST: pytest.approx([1, 1]),
        "forward matmul": pytest.approx([5, 0]),
        "recompute matmul": pytest.approx([2, 0]),
        "backward matmul": pytest.approx([6, 0]),
        "exposed all_gather": pytest.approx([0, 4]),
        "forward pointwise": pytest.approx([0, 1]),
    }


def test_on_a_gpu_an_all_to_all_is_not_a_transfer() -> None:
    events = [
        step(1, 0, 10),
        event("c10d::alltoall_base_", 0, 2),
        *kernel("ncclDevKernel_SendRecv", 1, 6, 21, launched=0.5),
        event("c10d::send", 6, 7),
        *kernel("ncclDevKernel_SendRecv", 7, 9, 21, launched=6.5),
    ]
    assert lines(events) == pytest.approx({HOST: 3, "exposed all_to_all": 5, WAIT: 2})


def test_a_trace_without_steps_has_no_lines() -> None:
    assert seconds_by_line([event("aten::mm", 0, 4)]) == {}

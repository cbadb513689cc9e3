"""What is said of an exception when memory has run out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError

from meshrunner.recipes import assembly, pretrain
from meshrunner.recipes.checkpoint import state_dict
from meshrunner.recipes.checkpoint.base import Saver
from meshrunner.runner.measure.out_of_memory import PARTS, explained

CPU = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "3221225472 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.19 GiB is free. "
    "Process 7 has 77.90 GiB memory in use."
)


NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
REPORTED_LATE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
BLOCK = "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` may help."


class OutOfMemoryError(RuntimeError):
    """As torch's is called; torch's own cannot be raised without CUDA."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(CPU), "out of host memory in step 3: tried to allocate 3.00 GiB"),
        (
            OutOfMemoryError(CUDA),
            "out of device memory in step 3: tried to allocate 2.00 GiB, 1.19 GiB of the device's 79.11 GiB were free",
        ),
        (MemoryError(), "out of host memory in step 3"),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes."),
            "out of host memory in step 3: tried to allocate 1.00 GiB",
        ),
    ],
)
def test_how_much_of_what(error: BaseException, said: str) -> None:
    assert str(explained(error, 3)) == said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (NCCL + "Cuda failure 2 'out of memory'", "Cuda failure 2 'out of memory'"),
        (NCCL + "Cuda failure 'out of memory'", "Cuda failure 'out of memory'"),
        (NCCL + "Failed to CUDA calloc 6291456 bytes", "Failed to CUDA calloc 6291456 bytes"),
        (NCCL + "Failed to CUDA calloc async 8 bytes", "Failed to CUDA calloc async 8 bytes"),
        ("CUDA error: out of memory" + REPORTED_LATE, "CUDA error: out of memory"),
        ("HIP error: out of memory" + REPORTED_LATE.replace("CUDA", "HIP"), "HIP error: out of memory"),
        ("CUDA driver error: out of memory", "CUDA driver error: out of memory"),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        ("Triton Error [CUDA]: out of memory", "Triton Error [CUDA]: out of memory"),
        ("OutOfMemoryError: " + CUDA, "tried to allocate 2.00 GiB, 1.19 GiB of the device's 79.11 GiB were free"),
        ("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a", "tried to allocate 20.00 MiB"),
    ],
)
def test_whoever_says_it(message: str, said: str) -> None:
    assert str(explained(RuntimeError(message), 3)) == f"out of device memory in step 3: {said}"


@pytest.mark.parametrize(
    "message",
    [
        "shape mismatch",
        BLOCK,
        NCCL + "Cuda failure 700 'an illegal memory access was encountered'",
        "CUDA error: device-side assert triggered" + REPORTED_LATE,
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    ],
)
def test_other_errors_are_none(message: str) -> None:
    assert explained(RuntimeError(message), 3) is None


def raised(wrap: Callable[[Exception], BaseException], *, cause: bool) -> BaseException:
    """What is caught where `wrap` replaces the exception that the allocator raised."""
    try:
        try:
            raise OutOfMemoryError(CUDA)
        except OutOfMemoryError as error:
            raise wrap(error) from (error if cause else None)
    except BaseException as error:
        return error


@pytest.mark.parametrize("cause", [True, False])
def test_what_it_was_raised_from_is_asked(cause: bool) -> None:
    assert "step 1: tried to allocate 2.00 GiB" in str(
        explained(raised(lambda _: ValueError("the saver has failed"), cause=cause), 1)
    )


def test_what_inductor_wraps() -> None:
    wrapped = raised(lambda error: InductorError(error, None), cause=False)
    assert "step 1: tried to allocate 2.00 GiB" in str(explained(wrapped, 1))
    flattened = explained(InductorError(OutOfMemoryError(CUDA), None), 1)  # keeps only the text of the error
    assert "step 1: tried to allocate 2.00 GiB" in str(flattened)
    assert explained(InductorError(RuntimeError(BLOCK), None), 1) is None


def test_exceptions_that_are_each_others_cause_come_to_an_end() -> None:
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert explained(one) is None


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError(CPU)
        return Fails.apply(x * self.weight)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise RuntimeError(CPU)


def failure(network: nn.Module, *, backward: bool) -> BaseException:
    with pytest.raises(RuntimeError) as raised:
        loss = network(torch.ones(2)).sum()
        assert backward
        loss.backward()
    return raised.value


def test_the_module_whose_forward_it_was() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Inner()))
    network[1][0].fails = True  # type: ignore[index]
    assert str(explained(failure(network, backward=False), 1)).startswith(
        "out of host memory in step 1 (forward of 1.0): tried to allocate 3.00"
    )


def test_backward() -> None:
    assert "in step 2 (backward): tried to allocate 3.00 GiB" in str(explained(failure(Inner(), backward=True), 2))


def test_before_the_first_step() -> None:
    def assemble() -> None:
        raise RuntimeError(CPU)

    with pytest.raises(RuntimeError) as raised:
        assemble()
    assert str(explained(raised.value)).startswith("out of host memory (building the model): ")


def test_the_functions_that_messages_name_exist() -> None:
    assert [
        name for name in PARTS if not any(hasattr(room, name) for room in (assembly, pretrain, state_dict, Saver))
    ] == []

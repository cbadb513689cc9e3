"""What is said of an exception when memory has run out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshrunner.runner.measure.out_of_memory import explained

CPU = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "3221225472 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.19 GiB is free. "
    "Process 7 has 77.90 GiB memory in use."
)


class OutOfMemoryError(RuntimeError):
    """As torch's is called; torch's own cannot be raised without CUDA."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(CPU), "out of host memory in step 3: 3.00 GiB more were asked for"),
        (
            OutOfMemoryError(CUDA),
            "out of device memory in step 3: 2.00 GiB more were asked for, 1.19 GiB of the device's 79.11 GiB were free",
        ),
        (MemoryError(), "out of host memory in step 3"),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes."),
            "out of host memory in step 3: 1.00 GiB more were asked for",
        ),
    ],
)
def test_how_much_of_what(error: BaseException, said: str) -> None:
    assert str(explained(error, 3)) == said


def test_other_errors_are_none() -> None:
    assert explained(RuntimeError("shape mismatch"), 3) is None


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
        "out of host memory in step 1 (forward of 1.0): 3.00"
    )


def test_backward() -> None:
    assert "in step 2 (backward): 3.00 GiB" in str(explained(failure(Inner(), backward=True), 2))


def test_before_the_first_step() -> None:
    def assemble() -> None:
        raise RuntimeError(CPU)

    with pytest.raises(RuntimeError) as raised:
        assemble()
    assert str(explained(raised.value)).startswith("out of host memory (building the model): ")

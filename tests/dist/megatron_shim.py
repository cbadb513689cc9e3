"""Stand-ins for CUDA on a CPU, with which the real megatron-fsdp package runs on gloo.

Nothing is asynchronous there, so a stream never has to wait for another. Overlap, NCCL and GPU memory are not tested.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


class Event:
    def wait(self) -> None:
        pass


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass

    def record_event(self) -> Event:
        return Event()


def stream(_: Stream) -> AbstractContextManager[None]:
    return nullcontext()


def get_tensor(self: Any, shape: list[int], dtype: torch.dtype, name: str, mem_alloc_context: object = None) -> Tensor:
    """Replace `GlobalMemoryBuffer.get_tensor`: allocate pool memory on the CPU instead of the current CUDA device."""
    buffer = self.buffer.get((name, dtype))
    if buffer is None or buffer.numel() < shape[0]:
        buffer = self.buffer[name, dtype] = torch.empty(shape, dtype=dtype)
    pooled: Tensor = buffer[: shape[0]]
    return pooled


@contextmanager
def one_by_one(group: dist.ProcessGroup, async_ops: bool = False) -> Iterator[Event]:
    """Replace torch's `_coalescing_manager`, because gloo's coalesced reduce-scatter sometimes corrupts memory (torch 2.13)."""
    yield Event()


def all_gather_into_tensor(*, async_op: bool = False, **arguments: Any) -> None:
    """Finish before returning, because nobody waits for the result."""
    ALL_GATHER(**arguments)


ALL_GATHER = dist.all_gather_into_tensor


@torch.no_grad()
def gradient_reduce_preprocessing(gradients: Tensor, factor: float, config: object) -> dist.ReduceOp.RedOpType:
    """Scale gradients as the package does for bf16. For fp32 it lets NCCL multiply, which gloo cannot."""
    gradients.mul_(factor)
    return dist.ReduceOp.SUM


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make Megatron-FSDP work on CPU tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_fsdp import param_and_grad_buffer, utils
    logging.getLogger("megatron_fsdp").setLevel(logging.ERROR)  # it warns of every device that is not the current one
    cuda = {"Stream": Stream, "stream": stream, "current_stream": Stream}
    cuda |= {"current_device": int, "synchronize": lambda: None, "empty_cache": lambda: None}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.object(Tensor, "cuda", lambda tensor: tensor))
        stack.enter_context(patch.object(utils.GlobalMemoryBuffer, "get_tensor", get_tensor))
        stack.enter_context(patch.object(dist, "all_gather_into_tensor", all_gather_into_tensor))
        own = {"_coalescing_manager": one_by_one, "gradient_reduce_preprocessing": gradient_reduce_preprocessing}
        stack.enter_context(patch.multiple(param_and_grad_buffer, **own))
        yield

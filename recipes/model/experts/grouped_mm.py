"""Grouped matmul: consecutive groups of rows, each multiplied by its own matrix, in one kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """
    Multiply each row by the weights of its group: [rows, out].

    x: [rows, in], with the rows of a group next to each other, or none; weights: [groups, in, out], in the dtype of x, where in
    and out are multiples of 16 bytes; ends: the row after the last of each group, [groups], int32.
    """
    if x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weights, offs=ends)
    # torch 2.14 still rejects other dtypes on meta and fake tensors, and hence in the compiler
    product: Tensor = torch.ops.meshrunner.grouped_mm(x, weights, ends)
    return product


def leaves_empty_groups(device: torch.device) -> bool:
    """
    Whether the kernel leaves the weight gradient of a group without rows unwritten, with whatever was in that memory.

    True on Blackwell (pytorch issue #172439, open in November 2026) and on AMD GPUs (pull request #174314).
    """
    return device.type == "cuda" and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 10
    )


class ZeroGradient(torch.autograd.Function):
    """Return weights, [groups, in, out], and zero the gradients of the groups that are `empty`, [groups], bool."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, empty: Tensor) -> Tensor:
        ctx.save_for_backward(empty)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (empty,) = ctx.saved_tensors
        return gradient.masked_fill(empty.view(-1, 1, 1), 0), None


# Except for bf16 on the newest GPUs, torch loops over the groups and reads their ends on the host, which a CUDA graph cannot.
@torch.library.custom_op("meshrunner::grouped_mm", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weights, offs=ends)


@_product.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[-1])


@torch.library.custom_op("meshrunner::grouped_mm_weights", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _gradient_of_weights(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    # The transpose must not be made contiguous: the rows of a contiguous one would be `rows` long, which is seldom a multiple
    # of 16 bytes.
    return F.grouped_mm(x.transpose(-2, -1), gradient, offs=ends)


@_gradient_of_weights.register_fake
def _(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], gradient.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()  # the kernel rejects an expanded gradient, such as that of a sum
    of_x = of_weights = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.meshrunner.grouped_mm(gradient, weights.transpose(-2, -1), ends)
    if ctx.needs_input_grad[1]:
        of_weights = torch.ops.meshrunner.grouped_mm_weights(x, gradient, ends)
    return of_x, of_weights, None


_product.register_autograd(_backward, setup_context=_save)

"""Operations on rows: sort, send, multiply by weights. A row, [dim], is a copy of a token for one expert."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives

_wait: Callable[[Tensor], Tensor] = collectives.wait_tensor


def inverse_of(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, [rows], int64."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies] if copies > 1 else x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        gradient = gradient[inverse]
        if ctx.copies > 1:
            gradient = gradient.view(-1, ctx.copies, gradient.shape[-1]).sum(1)
        return gradient, None, None, None


def permute(x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Repeat each row of x `copies` times, then reorder by `order`: [rows x copies, dim]. inverse: `inverse_of(order)`."""
    # Autograd's backward of indexing would add up gradients row by row. That is slow on a GPU, and not deterministic.
    return _Permute.apply(x, order, inverse, copies)  # type: ignore[no-untyped-call]


def exchanged(experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, load: Tensor, group: ProcessGroup) -> Tensor:
    """Send each row to the rank with its expert, apply the expert there, and return the results. rows: [rows, dim]; experts:
    this rank's `GroupedExperts`; load: number of rows that this rank sends to each expert of the group, [experts]."""
    ranks = group.size()
    with torch.no_grad():
        # Number of rows that arrive from each rank for each expert of this rank: [ranks, own experts].
        arriving = _wait(collectives.all_to_all_single(load, None, None, group)).view(ranks, -1)
        if load.is_meta:  # the loads are unknown: assume that all ranks get the same number of rows
            received = sent = [rows.shape[0] // ranks + (rank < rows.shape[0] % ranks) for rank in range(ranks)]
        else:  # the host waits for the device here, and only here, because it needs the sizes to issue the all-to-all
            received, sent = torch.stack((arriving.sum(1), load.view(ranks, -1).sum(1))).tolist()
        # Rows arrive sorted by rank, then by expert. The grouped matmul needs rows sorted by expert alone.
        expert = torch.arange(arriving.shape[1], device=load.device).repeat(ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        inverse = inverse_of(order)
    arrived = _wait(collectives.all_to_all_single_autograd(rows, received, sent, group))
    results = permute(experts(permute(arrived, order, inverse), arriving.sum(0)), inverse, order)
    return _wait(collectives.all_to_all_single_autograd(results, sent, received, group))


class FP32Linear(torch.autograd.Function):
    """F.linear in fp32. For backward, x is saved in its own dtype, not in fp32. x: [..., in]; weight: [out, in], fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = (gradient @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2).float() if ctx.needs_input_grad[1] else None
        return of_x, of_weight


class WeightedSum(torch.autograd.Function):
    """The weighted sum of each token's results, [tokens, dim], computed in fp32 and cast to the dtype of `results`. For
    backward, `results` are saved in their own dtype, not in fp32. results: [tokens, K, dim]; weights: [tokens, K], fp32."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(results, weights)
        # Without `copy`, torch 2.11 loses all gradients of a compiled Function if `to` returns its input (pytorch #180642).
        return (results.float() * weights.unsqueeze(-1)).sum(1).to(results.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        results, weights = ctx.saved_tensors
        gradient = gradient.float().unsqueeze(1)  # [tokens, 1, dim]
        of_results = (gradient * weights.unsqueeze(-1)).to(results.dtype) if ctx.needs_input_grad[0] else None
        of_weights = (gradient * results.float()).sum(-1) if ctx.needs_input_grad[1] else None
        return of_results, of_weights


class ScaleGradient(torch.autograd.Function):
    """Returns `x` unchanged. Backward multiplies the gradient of `x` by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the weights of the row's group: [rows, out]. x: [rows, in], sorted by group. Groups may be empty.
    weights: [groups, in, out], in the dtype of x. ends: index of the row after the last row of each group, [groups], int32. The
    row sizes of x and of the result must be multiples of 16 bytes."""
    if x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weights, offs=ends)
    # torch 2.14 still rejects dtypes other than bf16 on meta and fake tensors, and therefore in the compiler
    return torch.ops.meshrunner.grouped_mm(x, weights, ends)


def leaves_empty_groups(device: torch.device) -> bool:
    """Return whether grouped_mm on this device leaves weight gradients uninitialised for groups without rows."""
    # This happens on Blackwell (pytorch issue #172439, open in November 2026) and on AMD GPUs (pull request #174314).
    return device.type == "cuda" and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 10
    )


class ZeroGradient(torch.autograd.Function):
    """Returns weights, [groups, in, out], unchanged. Backward sets the gradient of each group in `empty`, [groups], to zero."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, empty: Tensor) -> Tensor:
        ctx.save_for_backward(empty)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (empty,) = ctx.saved_tensors
        return gradient.masked_fill(empty.view(-1, 1, 1), 0), None


# Except for bf16 on the newest GPUs, torch loops over groups and reads `ends` on the host. CUDA graphs cannot contain such reads.
@torch.library.custom_op("meshrunner::grouped_mm", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weights, offs=ends)


@_product.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[-1])


@torch.library.custom_op("meshrunner::grouped_mm_weights", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _gradient_of_weights(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    # A row of a contiguous transpose would have one element per row of x. Its size is seldom a multiple of 16 bytes.
    return F.grouped_mm(x.transpose(-2, -1), gradient, offs=ends)


@_gradient_of_weights.register_fake
def _(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], gradient.shape[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()  # the kernel rejects an expanded gradient, such as that of a sum
    of_x = of_weights = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.meshrunner.grouped_mm(gradient, weights.transpose(-2, -1), ends)
    if ctx.needs_input_grad[1]:
        of_weights = torch.ops.meshrunner.grouped_mm_weights(x, gradient, ends)
    return of_x, of_weights, None


_product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

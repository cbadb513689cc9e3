"""Movement of token rows, sorted by expert, to the ranks that hold the experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    """
    Return `copies` of each row of `x`, reordered: [rows x copies, dim].

    Backward applies the inverse. Autograd's own would add up gradients row by row: slow on a GPU, and not deterministic.
    """
    permuted: Tensor = _Permute.apply(x, order, inverse, copies)  # type: ignore[no-untyped-call]
    return permuted


def exchanged(experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, load: Tensor, group: ProcessGroup) -> Tensor:
    """
    Send rows, [rows, dim], to the ranks that hold their experts, compute there, and bring the results back.

    `experts` is this rank's `GroupedExperts`. `load` counts the rows for each expert of all ranks, [experts].
    """
    ranks = group.size()
    with torch.no_grad():
        # Rows that arrive, by sending rank and by expert of this rank: [ranks, own experts].
        arriving = _wait(collectives.all_to_all_single(load, None, None, group)).view(ranks, -1)
        if load.is_meta:  # the loads are unknown: assume that every rank gets the same
            received = sent = [rows.shape[0] // ranks + (rank < rows.shape[0] % ranks) for rank in range(ranks)]
        else:  # the only place where the host waits for the device, because it issues the all-to-all with these sizes
            received, sent = torch.stack((arriving.sum(1), load.view(ranks, -1).sum(1))).tolist()
        # They arrive sorted by rank, then by expert; the grouped matmul needs them sorted by expert alone.
        expert = torch.arange(arriving.shape[1], device=load.device).repeat(ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        inverse = inverse_of(order)
    arrived = _wait(collectives.all_to_all_single_autograd(rows, received, sent, group))
    results = permute(experts(permute(arrived, order, inverse), arriving.sum(0)), inverse, order)
    return _wait(collectives.all_to_all_single_autograd(results, sent, received, group))


class ScaleGradient(torch.autograd.Function):
    """Return `x` and multiply its gradient by a factor in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None

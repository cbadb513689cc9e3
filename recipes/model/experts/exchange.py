"""
Rows of tokens around experts: they are put in order, and sent to other ranks and back. Where all ranks have a part of each
expert, they are gathered before it and added up behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_wait: Callable[[Tensor], Tensor] = collectives.wait_tensor
# torch 2.13 has other names for the functions of before.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd
)


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes one, [rows], int64."""
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
    Rows of `x`, each `copies` times, in another order: [rows x copies, dim].

    Backward takes the inverse permutation, too. By itself autograd would add gradients row by row to zeros, which on a GPU is
    slow and not deterministic.
    """
    permuted: Tensor = _Permute.apply(x, order, inverse, copies)  # type: ignore[no-untyped-call]
    return permuted


def exchanged(experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, load: Tensor, group: ProcessGroup) -> Tensor:
    """
    Send rows to the ranks that hold their experts, compute there, and bring the results back.

    Args:
        experts: `GroupedExperts` of this rank.
        rows: sorted by expert, [rows, dim].
        load: rows of each expert, of all ranks' experts, [experts].
    """
    ranks = group.size()
    with torch.no_grad():
        theirs = _wait(collectives.all_to_all_single(load, None, None, group)).view(ranks, -1)  # [from, own experts]
        received, sent = _sizes(theirs, load, rows.shape[0])
        own = torch.arange(theirs.shape[1], device=load.device).repeat(ranks)
        order = own.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
        inverse = inverse_of(order)
    arrived = _wait(collectives.all_to_all_single_autograd(rows, received, sent, group))
    results = permute(experts(permute(arrived, order, inverse), theirs.sum(0)), inverse, order)
    return _wait(collectives.all_to_all_single_autograd(results, sent, received, group))


def _sizes(theirs: Tensor, load: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """
    Rows received from each rank, and sent to each. The one place where the host waits for the device: it has to know them.

    On meta, where nobody knows them, the ranks' loads are equal.

    Args:
        theirs: rows from each rank for each expert of this one, [ranks, own experts].
        load: rows for each expert, [experts].
    """
    ranks = theirs.shape[0]
    if load.is_meta:
        even = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return even, even
    received, sent = torch.stack((theirs.sum(1), load.view(ranks, -1).sum(1))).tolist()
    return received, sent


def around_tensor_parallel(
    route: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    x: Tensor,
    bias: Tensor,
    group: ProcessGroup,
    *,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Compute experts of which this rank has a part of the width: gather its input, add up its output.

    Args:
        route: (x, bias) -> (this rank's part of the output, load, balance loss); x: [batch, seq, dim], of whole sequences.
        x, bias: as of `ExpertFeedForward.forward`.
        sequence_parallel: x and the output are shards over the sequence.
    """
    x = x.to_local() if isinstance(x, DTensor) else x
    x = _wait(_gather(x.contiguous(), 1, group)) if sequence_parallel else sum_gradient(x, group)
    y, load, balance = route(x, bias)
    y = _wait(_reduce_scatter(y.contiguous(), "sum", 1, group)) if sequence_parallel else _sum(y, group)
    # Every rank has the whole balance loss, and its gradient is added to that of the others.
    whole = balance.detach()
    return y, load, whole + (balance - whole) / group.size()


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` as it is; its gradient times a factor."""
    same: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return same


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _wait(collectives.all_reduce(gradient.contiguous(), "sum", ctx.group)), None


def sum_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x`, which every rank of a group has whole; its gradient, of which every rank has a part, summed over the group."""
    same: Tensor = _SumGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return same


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _wait(collectives.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over a group; every rank has the sum's gradient."""
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total

"""Movement of token rows around experts.

Rows are sorted by expert. With expert parallelism they are sent to the ranks that hold the experts, and back. With tensor
parallelism, where every rank holds a part of each expert, inputs are gathered and outputs summed.
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
# Renamed in torch 2.13.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd
)


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

    Backward applies the inverse permutation. Autograd's own backward of indexing would accumulate gradients row by row, which
    is slow on a GPU and not deterministic.
    """
    permuted: Tensor = _Permute.apply(x, order, inverse, copies)  # type: ignore[no-untyped-call]
    return permuted


def exchanged(experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, load: Tensor, group: ProcessGroup) -> Tensor:
    """
    Send rows to the ranks that hold their experts, compute there, and bring the results back.

    Args:
        experts: `GroupedExperts` of this rank.
        rows: sorted by expert, [rows, dim].
        load: rows for each expert of all ranks, [experts].
    """
    ranks = group.size()
    with torch.no_grad():
        # Rows that arrive, by sending rank and by expert of this rank: [ranks, own experts].
        arriving = _wait(collectives.all_to_all_single(load, None, None, group)).view(ranks, -1)
        received, sent = _sizes(arriving, load, rows.shape[0])
        # They arrive sorted by rank, then by expert; the grouped matmul needs them sorted by expert alone.
        expert = torch.arange(arriving.shape[1], device=load.device).repeat(ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        inverse = inverse_of(order)
    arrived = _wait(collectives.all_to_all_single_autograd(rows, received, sent, group))
    results = permute(experts(permute(arrived, order, inverse), arriving.sum(0)), inverse, order)
    return _wait(collectives.all_to_all_single_autograd(results, sent, received, group))


def _sizes(arriving: Tensor, load: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """
    Return the rows received from each rank, and the rows sent to each.

    Only here does the host wait for the device, because it issues the all-to-all and must know its sizes. On meta, where
    they are unknown, every rank is assumed to get the same load.

    Args:
        arriving: rows from each rank for each expert of this one, [ranks, own experts].
        load: rows for each expert, [experts].
    """
    ranks = arriving.shape[0]
    if load.is_meta:
        even = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return even, even
    received, sent = torch.stack((arriving.sum(1), load.view(ranks, -1).sum(1))).tolist()
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
    Compute experts whose width is split over a group: gather the input, sum the output.

    Args:
        route: (x, bias) -> (this rank's part of the output, load, balance loss); x: [batch, seq, dim], whole sequences.
        x, bias: see `ExpertFeedForward.forward`.
        sequence_parallel: x and the output are sharded over the sequence.
    """
    x = x.to_local() if isinstance(x, DTensor) else x
    x = _wait(_gather(x.contiguous(), 1, group)) if sequence_parallel else sum_gradient(x, group)
    y, load, balance = route(x, bias)
    y = _wait(_reduce_scatter(y.contiguous(), "sum", 1, group)) if sequence_parallel else _sum(y, group)
    # Every rank computes the whole balance loss and the gradients of the ranks are summed, so each contributes its share.
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
    """Return `x` and multiply its gradient by a factor in backward."""
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
    """Return `x`, which is the same on every rank of a group, and sum its partial gradients over the group in backward."""
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
    """Return the sum of `x` over a group. In backward every rank already has the gradient of the sum."""
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total

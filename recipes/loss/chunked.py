"""The projection and the cross entropy chunk by chunk, in one call of the projection's module.

FSDP gathers that module's weight when it is called and reduces its gradient once it has gone backward: called for every chunk, it
would do so for every chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

SummedLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits [batch, seq, vocab], targets [batch, seq]) -> sum of the token losses, fp32."""


def takes_chunks(output: nn.Module) -> bool:
    """Whether `install` knows how this module projects: a linear layer, whole or split over the vocabulary."""
    if type(output) is not nn.Linear or output.bias is not None:
        return False
    return not isinstance(output.weight, DTensor) or output.weight.placements == (Shard(0),)


def install(output: nn.Module, summed: SummedLoss, tokens: int) -> None:
    """
    Have `output(hidden, targets=targets)` return the sum of the token losses; without targets it still returns logits.

    It is called before anything but tensor parallelism has wrapped the module.

    Args:
        output: the projection, for which `takes_chunks` holds.
        tokens: tokens in one chunk.
    """
    assert isinstance(output, nn.Linear)
    # What tensor parallelism does with the logits, it does with those of every chunk.
    hooks = list(output._forward_hooks.values())
    output._forward_hooks.clear()

    def forward(hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return after(F.linear(hidden, output.weight))
        weight = output.weight
        if not isinstance(weight, DTensor):
            return summed_in_chunks(weight, summed, hidden, targets, tokens)
        assert isinstance(hidden, DTensor)
        mesh = weight.device_mesh
        # Every rank knows its share of the vocabulary alone, and so a part of the gradient of `hidden`.
        hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def summed_of_split(local: Tensor, targets: Tensor) -> Tensor:
            batch, seq = targets.shape
            # Given, not inferred: the ranks' shares of the vocabulary may differ in size.
            whole = torch.Size((batch, seq, output.out_features))
            stride = (seq * output.out_features, output.out_features, 1)
            return summed(after(DTensor.from_local(local, mesh, [Shard(-1)], shape=whole, stride=stride)), targets)

        return summed_in_chunks(weight.to_local(), summed_of_split, hidden, targets, tokens)

    def after(logits: Tensor) -> Tensor:
        for hook in hooks:
            logits = hook(output, (), logits)
        return logits

    output.forward = forward  # type: ignore[method-assign, assignment]


def summed_in_chunks(weight: Tensor, summed: SummedLoss, hidden: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """
    Sum of the token losses. The logits of a chunk are computed, freed, and computed again in backward.

    The weight's gradient is added up in fp32 over the chunks, whatever its dtype: in bf16 every addition would round.

    Args:
        weight: [vocab, dim], or this rank's rows of it.
        hidden: [batch, seq, dim].
        targets: [batch, seq].
    """
    positions = max(1, tokens // hidden.shape[0])
    chunks = zip(torch.split(hidden, positions, 1), torch.split(targets, positions, 1), strict=True)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if torch.compiler.is_compiling():
        # It cannot trace what is below. Autograd adds up in the dtype of what it is the gradient of, and the compiler sees
        # that going forward nothing has to be converted.
        dtype, weight = weight.dtype, weight.float()

        def simply(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return summed(F.linear(hidden, weight.to(dtype)), targets)

        return torch.stack([_local(again(simply, chunk, part, weight)) for chunk, part in chunks]).sum()

    def of_chunk(hidden: Tensor, targets: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        own, gradient = _OwnGradient.apply(weight.detach(), gradient)  # type: ignore[no-untyped-call]
        return summed(F.linear(hidden, own), targets), gradient

    gradient = _Gradient.apply(weight)  # type: ignore[no-untyped-call]
    losses = []
    for chunk, part in chunks:
        loss, gradient = again(of_chunk, chunk, part, gradient)
        losses.append(_local(loss))
    return torch.stack(losses).sum()


def _local(loss: Tensor) -> Tensor:
    return loss.to_local() if isinstance(loss, DTensor) else loss


class _Gradient(Function):
    """A stand-in for the weight through which its gradient comes back, in fp32; going forward it is no memory."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        gradient: Tensor = gradients[0].to(ctx.dtype)
        return gradient


class _OwnGradient(Function):
    """The weight for one chunk, whose gradient is added to that of the chunks behind it, which went backward before."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor]:
        own, behind = gradients
        # In place, as nobody else holds it: one fp32 gradient of the largest weight at a time, not one more.
        return None, own.float() if behind is None else behind.add_(own)

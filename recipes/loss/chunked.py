"""Compute the output projection and the cross entropy chunk by chunk, in a single call of the projection module. With one call
per chunk, FSDP would gather the module's weight and reduce the weight's gradient once per chunk."""

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
"""(logits [batch, seq, vocab], targets [batch, seq]) -> sum of the token losses, 0-d, fp32."""


def takes_chunks(output: nn.Module) -> bool:
    """Return whether `install` supports `output`: a linear layer without bias, whole or split over the vocabulary."""
    if type(output) is not nn.Linear or output.bias is not None:
        return False
    return not isinstance(output.weight, DTensor) or output.weight.placements == (Shard(0),)


def install(output: nn.Module, summed: SummedLoss, tokens: int) -> None:
    """Make `output(hidden, targets=targets)` sum the loss over chunks of `tokens` tokens. `output(hidden)` returns logits."""
    assert isinstance(output, nn.Linear)
    # Tensor parallelism redistributes logits in forward hooks. Here the hooks are applied to the logits of each chunk.
    hooks = list(output._forward_hooks.values())
    output._forward_hooks.clear()

    def forward(hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return redistributed(F.linear(hidden, output.weight))
        weight = output.weight
        if not isinstance(weight, DTensor):
            return summed_in_chunks(weight, summed, hidden, targets, tokens)
        assert isinstance(hidden, DTensor)
        mesh = weight.device_mesh
        # Each rank has a shard of the vocabulary, and so computes a partial sum of the gradient of `hidden`.
        hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def summed_of_split(local: Tensor, targets: Tensor) -> Tensor:
            batch, seq = targets.shape
            # The global shape is given explicitly, because ranks may have shards of different sizes.
            whole = torch.Size((batch, seq, output.out_features))
            stride = (seq * output.out_features, output.out_features, 1)
            # A variable for the logits before redistribution would keep their memory until the loss is computed.
            return summed(
                redistributed(DTensor.from_local(local, mesh, [Shard(-1)], shape=whole, stride=stride)), targets
            )

        return summed_in_chunks(weight.to_local(), summed_of_split, hidden, targets, tokens)

    def redistributed(logits: Tensor) -> Tensor:
        for hook in hooks:
            logits = hook(output, (), logits)
        return logits

    output.forward = forward  # type: ignore[method-assign, assignment]


def summed_in_chunks(weight: Tensor, summed: SummedLoss, hidden: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """Return the sum of the token losses. Forward frees the logits of each chunk, and backward recomputes the logits. The
    weight's gradient is accumulated over the chunks in fp32, because bf16 would round every addition. weight: [vocab, dim], or
    this rank's rows of the weight; hidden: [batch, seq, dim]; targets: [batch, seq]."""
    positions = max(1, tokens // hidden.shape[0])
    chunks = zip(torch.split(hidden, positions, 1), torch.split(targets, positions, 1), strict=True)
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if torch.compiler.is_compiling():
        # The compiler cannot trace the autograd functions below. An fp32 copy of the weight makes autograd accumulate the
        # gradient in fp32. In forward, the compiler removes the conversion to fp32 and back.
        dtype, weight = weight.dtype, weight.float()

        def traced_loss(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return summed(F.linear(hidden, weight.to(dtype)), targets)

        return torch.stack([_local(recomputed(traced_loss, chunk, part, weight)) for chunk, part in chunks]).sum()

    def chunk_loss(hidden: Tensor, targets: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        own, gradient = _ChunkWeight.apply(weight.detach(), gradient)  # type: ignore[no-untyped-call]
        return summed(F.linear(hidden, own), targets), gradient

    # `gradient` passes through all chunks, so that backward accumulates the weight's gradient along this chain.
    gradient = _GradientCarrier.apply(weight)  # type: ignore[no-untyped-call]
    losses = []
    for chunk, part in chunks:
        loss, gradient = recomputed(chunk_loss, chunk, part, gradient)
        losses.append(_local(loss))
    return torch.stack(losses).sum()


def _local(loss: Tensor) -> Tensor:
    return loss.to_local() if isinstance(loss, DTensor) else loss


class _GradientCarrier(Function):
    """Returns fp32 zeros in the weight's shape. Backward returns the gradient of these zeros as the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        gradient: Tensor = gradients[0].to(ctx.dtype)
        return gradient


class _ChunkWeight(Function):
    """Returns the weight for one chunk. Backward adds this chunk's weight gradient to the sum of the later chunks' gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor]:
        own, later = gradients
        # Add in place, because nothing else uses `later`. A new tensor would raise peak memory by one fp32 weight gradient.
        return None, own.float() if later is None else later.add_(own)

"""The `loss` group: options that compute next-token cross entropy from the last hidden state and the output projection.
The model's forward calls the loss function, so that FSDP has gathered the projection's weight before the loss is computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshrunner.recipes.loss.chunked import SummedLoss

    LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
    """(output projection, hidden [batch, seq, dim], targets [batch, seq]) -> mean token loss."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the token losses, in fp32. logits: [batch, seq, vocab]; targets: [batch, seq]."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def with_gradient_of(loss: Tensor, other: Tensor | None) -> Tensor:
    """Return a 0-d tensor with the value of `loss`, but the gradient of `loss + other`."""
    return loss if other is None else to_plain(loss) + (other - other.detach())


def to_plain(loss: Tensor) -> Tensor:
    """Return a loss as a plain tensor. The loss is a DTensor if the logits are split over the vocabulary."""
    from torch.distributed.tensor import DTensor

    return loss.full_tensor() if isinstance(loss, DTensor) else loss


class Loss(Option):
    """Base class of the `loss` options. All options compute the same loss, but differ in memory and speed."""

    kinds: ClassVar[dict[str, str]] = {
        "plain": "meshrunner.recipes.loss.base:PlainLoss",
        "chunked": "meshrunner.recipes.loss.base:ChunkedLoss",
    }

    z: float = Field(0.0, ge=0)
    """Weight of the z-loss, the mean of log(Z)^2. Z is the sum of exp(logit). train/loss does not include the z-loss."""

    def summed(self) -> SummedLoss:
        """Return the function that sums the token losses. Its gradient, but not its value, includes the z-loss if `z` is set."""
        if not self.z:
            return cross_entropy
        from meshrunner.recipes.loss.z_loss import squared_log_z

        z = self.z

        def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
            logits = logits.float()  # one fp32 copy for both terms
            return with_gradient_of(cross_entropy(logits, targets), z * squared_log_z(logits, targets))

        return with_z_loss

    def install(self, output: nn.Module | None, summed: SummedLoss) -> LossFunction:
        """Return the loss function. Call `install` before FSDP wraps the network, because `install` may modify `output`."""
        return self.function(summed)

    @abstractmethod
    def function(self, summed: SummedLoss) -> LossFunction:
        """Return the loss function that the model calls. summed: the result of `summed`, possibly compiled."""


class PlainLoss(Loss):
    """Cross entropy that keeps the logits of all tokens in memory at the same time."""

    def function(self, summed: SummedLoss) -> LossFunction:
        return lambda output, hidden, targets: summed(output(hidden), targets) / targets.numel()


class ChunkedLoss(Loss):
    """Cross entropy computed in chunks of tokens. Backward recomputes the logits, so memory holds one chunk's logits at a time.
    The projection's gradient is accumulated over the chunks in fp32 and then reduced over ranks once."""

    tokens: Count
    """Tokens per chunk on one device. A chunk covers the same positions (at least 1) of all `micro_batch` sequences."""

    def install(self, output: nn.Module | None, summed: SummedLoss) -> LossFunction:
        from meshrunner.recipes.loss import chunked

        if output is None or not chunked.takes_chunks(output):
            return self.function(summed)
        chunked.install(output, summed, self.tokens)
        return lambda output, hidden, targets: output(hidden, targets=targets) / targets.numel()

    def function(self, summed: SummedLoss) -> LossFunction:
        """Return a loss function that calls the output projection once per chunk. The projection can be any module."""
        import torch
        from torch.distributed.tensor import DTensor
        from torch.utils.checkpoint import checkpoint

        def chunk_loss(output: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
            return summed(output(hidden), targets)

        def mean_loss(output: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
            if isinstance(hidden, DTensor):
                hidden = hidden.to_local()
            # Under sequence parallelism, a rank holds a shard of every sequence. A chunk is the same range of positions in each
            # shard. The projection gathers the parts of a chunk in rank order, so the targets are selected in this order.
            parts = targets.view(targets.shape[0], -1, hidden.shape[1])  # [batch, shards, positions of a shard]
            positions = max(1, self.tokens // hidden.shape[0])
            losses = [
                checkpoint(chunk_loss, output, chunk, part.flatten(1), use_reentrant=False, preserve_rng_state=False)
                for chunk, part in zip(torch.split(hidden, positions, 1), torch.split(parts, positions, 2), strict=True)
            ]
            return torch.stack(losses).sum() / targets.numel()

        return mean_loss

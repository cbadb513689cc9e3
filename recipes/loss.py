"""The `loss` group: cross entropy of the next token, from the last hidden state and the output projection.

It is computed inside the model's forward, where data parallelism has the projection's weight at hand.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from meshrunner.recipes.option import Count, Option

if TYPE_CHECKING:
    from torch import Tensor, nn

    Summed = Callable[[Tensor, Tensor], Tensor]
    """(logits [batch, seq, vocab], targets [batch, seq]) -> sum of the tokens' losses, fp32."""
    LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
    """(output projection, hidden [batch, seq, dim], targets [batch, seq]) -> mean loss of the tokens."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the tokens' losses, in fp32. logits: [batch, seq, vocab]; targets: [batch, seq]."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Loss(Option):
    """How the loss is computed; what it is does not depend on that."""

    kinds: ClassVar[dict[str, str]] = {
        "plain": "meshrunner.recipes.loss:Plain",
        "chunked": "meshrunner.recipes.loss:Chunked",
    }

    @abstractmethod
    def function(self, summed: Summed) -> LossFunction:
        """The loss as the model calls it, from the cross entropy of given logits (which may be compiled)."""


class Plain(Loss):
    """The logits of all tokens at once."""

    def function(self, summed: Summed) -> LossFunction:
        return lambda output, hidden, targets: summed(output(hidden), targets) / targets.numel()


class Chunked(Loss):
    """The logits of some tokens at a time; backward computes them again, so the whole is never in memory."""

    tokens: Count
    """Tokens of one chunk on one device, at least one position of every sequence."""

    def function(self, summed: Summed) -> LossFunction:
        import torch
        from torch.distributed.tensor import DTensor
        from torch.utils.checkpoint import checkpoint

        def one(output: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
            return summed(output(hidden), targets)

        def mean(output: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
            if isinstance(hidden, DTensor):
                hidden = hidden.to_local()
            # Under sequence parallelism a rank has a part of every sequence. The projection gathers the same positions
            # of all parts, one part after the other, so the targets of a chunk are picked in that order.
            parts = targets.view(targets.shape[0], -1, hidden.shape[1])
            positions = max(1, self.tokens // hidden.shape[0])
            losses = [
                checkpoint(
                    one,
                    output,
                    hidden[:, i : i + positions],
                    parts[:, :, i : i + positions].flatten(1),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                for i in range(0, hidden.shape[1], positions)
            ]
            return torch.stack(losses).sum() / targets.numel()

        return mean

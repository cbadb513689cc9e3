"""What a model's module must offer beyond `forward`, so that every layout can wrap, initialise and train it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

if TYPE_CHECKING:
    from meshrunner.recipes.loss import LossFunction


class Network(nn.Module):
    """A language model."""

    draws: ClassVar[bool] = False
    """Whether forward draws random numbers, for dropout and the like."""
    loss: LossFunction
    """What `forward` answers when it is given targets."""

    @abstractmethod
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """
        Args:
            tokens: [batch, seq].
            targets: the tokens that follow, [batch, seq].

        Returns:
            Without targets the logits, [batch, seq, vocab]; with them the mean loss, 0-d, fp32.
        """

    @abstractmethod
    def block_names(self) -> list[str]:
        """Names of the repeated blocks, first to last: the units that are sharded, compiled and recomputed."""

    @abstractmethod
    def initial_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial truncated normal; None for a parameter that begins as ones."""

    def tensor_plan(self, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        """Module name -> how tensor parallelism splits it."""
        raise NotImplementedError(f"{type(self).__name__} has no plan for tensor parallelism")

    def tensor_entries(self) -> list[str]:
        """Modules whose output is the result of a collective and goes into a block."""
        return []

    def tie_weights(self) -> None:
        """Make modules share the parameters they should share: `Module.to_empty` gives each module one of its own."""

    def reset_buffers(self) -> None:
        """Compute the buffers after the module was materialised from meta."""

"""The interface of a model's module, through which every layout can wrap, initialise and train it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from meshrunner.recipes.loss.base import LossFunction
    from meshrunner.recipes.model.balance import Loads
    from meshrunner.recipes.model.initial import Initial


class Network(nn.Module):
    """A language model."""

    uses_rng: ClassVar[bool] = False
    """Whether forward uses random numbers, such as for dropout."""
    loads: Loads | None = None
    """What experts had to do since the last optimizer step, which every training forward adds to; None: it has no experts."""
    observed: Mapping[str, Tensor] = MappingProxyType({})
    """Key of events.jsonl -> its sum over the forwards since the last optimizer step, 0-d, fp32; no buffers, as of `Loads`."""
    loss: LossFunction
    """
    `loss(output, hidden, targets)`, set before training by the option in group `loss`. `forward` calls it, with targets, in
    place of its output projection:

        output: the module of the output projection; it is passed on, not called, so that logits can be computed in chunks.
            A linear layer named `output` is called once for all chunks, any other module for each.
        hidden: the last hidden state, after the final norm, [batch, seq, dim].
        targets: the next tokens, [batch, seq], int64.

    It returns the mean loss of the tokens, 0-d, fp32.
    """

    @abstractmethod
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """
        Args:
            tokens: [batch, seq].
            targets: the next tokens, [batch, seq].

        Returns:
            The logits, [batch, seq, vocab]; with targets the mean loss, 0-d, fp32.
        """

    @abstractmethod
    def block_names(self) -> list[str]:
        """Names of the repeated blocks, first to last: the default units of wrapping, compilation and recomputation."""

    def initial(self, name: str) -> Initial:
        """The distribution of a parameter's initial values."""
        raise NotImplementedError(f"{type(self).__name__} has no method `initial(name)`: a parameter's initial values")

    def is_stack(self, name: str) -> bool:
        """Whether a parameter is a stack of matrices, [number, in, out], of which each has initial values of its own."""
        return False

    def stays_fp32(self, name: str) -> bool:
        """Whether a parameter should compute in fp32 where `precision` lowers the others, as far as the layout can."""
        return False

    def exchanged_elements(self, block: int) -> int:
        """Elements that a token sends to experts in a block, with expert parallelism: its width for each of them; 0 without."""
        return 0

    def calls(self, name: str) -> int:
        """How often a forward with targets calls a module outside the blocks, such as the output projection; "": itself."""
        return 1

    def tensor_plan(self, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        """Module name -> its style of tensor parallelism."""
        raise NotImplementedError(f"{type(self).__name__} has no tensor-parallel plan")

    def collective_outputs(self) -> list[str]:
        """Modules whose output comes from a tensor-parallel collective and is the input of a block."""
        return []

    def tie_weights(self) -> None:
        """Tie shared parameters again: `Module.to_empty` unties them."""

    def reset_buffers(self) -> None:
        """Compute the buffers, once the module is materialised."""

    def begin_observing(self, key: str, device: torch.device) -> None:
        """Have a figure recorded of every step, in addition to the loss."""
        self.observed = {**self.observed, key: torch.zeros((), device=device)}

    def observe(self, key: str, value: Tensor) -> None:
        """The figure of this forward, 0-d; a step's is the mean over its forwards and ranks."""
        if key in self.observed and torch.is_grad_enabled():
            with torch.no_grad():
                self.observed[key].add_(value)


def network_of(model: nn.Module) -> Network:
    """What a model is or wraps: its first module that is a network."""
    return next(module for module in model.modules() if isinstance(module, Network))

"""The interface of a model's module, through which every layout can wrap, initialise and train it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from meshrunner.recipes.loss.base import LossFunction
    from meshrunner.recipes.model.balance import Loads
    from meshrunner.recipes.model.distributions import Initial


class Network(nn.Module):
    """A language model. Subclasses implement `forward`, `block_names` and `initial`; the other methods have defaults."""

    uses_rng: ClassVar[bool] = False
    """Whether forward uses random numbers, such as for dropout."""
    loads: Loads | None = None
    """Tokens per expert since the last optimizer step, which every training forward adds to; None without experts."""
    expert_mesh: DeviceMesh | None = None
    """Mesh with the dimensions `expert_shard` and `expert` if experts lie on several devices, else None."""
    observed: Mapping[str, Tensor] = MappingProxyType({})
    """Key of events.jsonl -> its sum over the forwards since the last optimizer step, 0-d, fp32. Not buffers: see `Loads`."""
    loss: LossFunction
    """
    Set before training by the option in group `loss`. `forward` calls it, when it has targets, instead of its output projection:

        loss(output, hidden [batch, seq, dim] after the final norm, targets [batch, seq]) -> mean loss of the tokens, 0-d, fp32

    `output` is the module of the projection, so that logits can be computed in chunks. A linear layer named `output` is called
    once for all chunks, any other module once for each.
    """

    @abstractmethod
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of tokens, [batch, seq, vocab], or with targets, [batch, seq], the mean loss, 0-d, fp32."""

    @abstractmethod
    def block_names(self) -> list[str]:
        """Return the names of the repeated blocks, in order: the default units of wrapping, compilation and recomputation."""

    def initial(self, name: str) -> Initial:
        """Return the distribution from which the initial values of a parameter are drawn."""
        raise NotImplementedError(f"{type(self).__name__} has no method `initial(name)`: a parameter's initial values")

    def is_stack(self, name: str) -> bool:
        """Whether a parameter is a stack of matrices, [number, in, out], each of which is initialised by itself."""
        return False

    def stays_fp32(self, name: str) -> bool:
        """Whether to compute with a parameter in fp32, as far as the layout can, where `precision` lowers the others."""
        return False

    def exchanged_elements(self, block: int) -> int:
        """Return the elements that expert parallelism sends to other ranks per token in a block; 0 without experts."""
        return 0

    def calls(self, name: str) -> int:
        """Return how often a forward with targets calls a module outside the blocks; "" is the network itself."""
        return 1

    def multiplied_modules(self) -> list[nn.Module]:
        """Return the modules whose weights multiply tokens, once for each call, in the order of a forward with targets."""
        return [module for module in self.children() if not isinstance(module, nn.Embedding)]

    def active_elements(self, name: str) -> int:
        """Return the number of elements of a parameter that a token is multiplied by."""
        return self.get_parameter(name).numel()

    def tensor_plan(self, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        """Return the style of tensor parallelism of each module that is split, by its name."""
        raise NotImplementedError(f"{type(self).__name__} has no tensor-parallel plan")

    def collective_outputs(self) -> list[str]:
        """Return the modules whose output comes from a tensor-parallel collective and is the input of a block."""
        return []

    def tie_weights(self) -> None:
        """Tie shared parameters again after `Module.to_empty`, which unties them."""

    def reset_buffers(self) -> None:
        """Compute the buffers, once the module is materialised."""

    def begin_observing(self, key: str, device: torch.device) -> None:
        """Record a figure of every step under `key`, in addition to the loss."""
        self.observed = {**self.observed, key: torch.zeros((), device=device)}

    def observe(self, key: str, value: Tensor) -> None:
        """Add the figure of this forward, 0-d. The mean over a step's forwards and ranks is recorded."""
        if key in self.observed and torch.is_grad_enabled():
            with torch.no_grad():
                self.observed[key].add_(value)


def network_of(model: nn.Module) -> Network:
    """Return the network that a model is or wraps."""
    return next(module for module in model.modules() if isinstance(module, Network))

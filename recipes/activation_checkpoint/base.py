"""The `activation_checkpoint` options that treat blocks as a whole, and the base class of all. By operator: selective_op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option

if TYPE_CHECKING:
    from torch import nn


class ActivationCheckpoint(Option):
    """Which blocks give up their activations after forward and recompute them in backward (Chen et al. 2016)."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.recipes.activation_checkpoint.base:NoRecompute",
        "full": "meshrunner.recipes.activation_checkpoint.base:Full",
        "selective_layer": "meshrunner.recipes.activation_checkpoint.base:SelectiveLayer",
        "selective_op": "meshrunner.recipes.activation_checkpoint.selective_op:SelectiveOp",
        "memory_budget": "meshrunner.recipes.activation_checkpoint.base:MemoryBudget",
    }

    compiled_with_block: ClassVar[bool] = False
    """True: compilation has to see what is recomputed, so the checkpointed block is compiled. False: the compiled block
    is checkpointed, from outside."""

    @property
    def recomputes_attention(self) -> bool:
        """Whether the compiler is told to compute attention again; recomputing whole blocks is not its affair."""
        return False

    def problems(self) -> list[str]:
        """What is wrong with the option and only shows with torch at hand; [] when nothing is."""
        return []

    def configure(self) -> None:
        """Set what is global to a process. Called by every worker before anything is compiled."""

    def recomputes(self, block: int) -> bool:
        """Whether anything of a block, counted from 0, is computed again."""
        return False

    def wrap(self, block: nn.Module, *, draws: bool) -> nn.Module:
        """
        The module that takes a block's place.

        Args:
            draws: forward draws random numbers, which recomputing has to draw again.
        """
        return block


class NoRecompute(ActivationCheckpoint):
    """Every activation that backward needs is kept."""


class Recompute(ActivationCheckpoint):
    """Base of the options that wrap blocks."""

    early_stop: bool
    """Recompute only as far as backward needs, not to the end of the block."""
    determinism_check: bool
    """Compare shape, dtype and device of what is recomputed with what forward had; a mismatch is an error."""

    def recomputes(self, block: int) -> bool:
        return True

    def wrap(self, block: nn.Module, *, draws: bool) -> nn.Module:
        return self._checkpointed(block, draws=draws)

    def _checkpointed(self, block: nn.Module, *, draws: bool, **how: Any) -> nn.Module:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        return checkpoint_wrapper(
            block,
            preserve_rng_state=draws,
            early_stop=self.early_stop,
            determinism_check="default" if self.determinism_check else "none",
            **how,
        )


class Full(Recompute):
    """Only the input of every block is kept: the least memory, and one more forward."""


class SelectiveLayer(Recompute):
    """Every k-th block is recomputed as a whole, the others keep everything: a trade in steps of one block."""

    every: Count
    """Length of a group of consecutive blocks of which the first is recomputed; 1: all blocks."""

    def recomputes(self, block: int) -> bool:
        return block % self.every == 0


class MemoryBudget(ActivationCheckpoint):
    """The compiler keeps what is worth most within a budget of memory (functorch's knapsack partitioner)."""

    budget: float = Field(ge=0, le=1)
    """Part of the activations that backward would keep anyway under compilation; 0: recompute all, 1: change nothing."""

    def configure(self) -> None:
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = self.budget

    def recomputes(self, block: int) -> bool:
        return self.budget < 1

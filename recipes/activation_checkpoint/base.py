"""The base class of the `activation_checkpoint` options, and the options that recompute whole blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option

if TYPE_CHECKING:
    from torch import nn


class ActivationCheckpoint(Option):
    """Chooses the blocks that drop their activations after forward and recompute them in backward (Chen et al. 2016)."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.recipes.activation_checkpoint.base:NoRecompute",
        "full": "meshrunner.recipes.activation_checkpoint.base:Full",
        "selective_layer": "meshrunner.recipes.activation_checkpoint.base:SelectiveLayer",
        "selective_op": "meshrunner.recipes.activation_checkpoint.selective_op:SelectiveOp",
        "memory_budget": "meshrunner.recipes.activation_checkpoint.base:MemoryBudget",
    }

    inside_compile: ClassVar[bool] = False
    """True: the checkpointed block is compiled, so the compiler sees it. False: the compiled block is checkpointed."""

    @property
    def recomputes_attention(self) -> bool:
        """Whether the compiler is asked to recompute attention; it does not see the recomputation of whole blocks."""
        return False

    @property
    def repeats_exchange(self) -> bool:
        """Whether recomputing a block sends its tokens to their experts again."""
        return False

    def problems(self) -> list[str]:
        """Return one sentence for each mistake that only torch can detect."""
        return []

    def configure(self) -> None:
        """Set process-wide options, in every worker, before anything is compiled."""

    def recomputes(self, block: int) -> bool:
        """Whether any part of a block, counted from 0, is recomputed."""
        return False

    def wrap(self, block: nn.Module, *, preserve_rng_state: bool) -> nn.Module:
        """Return the module that replaces a block. preserve_rng_state: make recomputation draw the same random numbers."""
        return block


class NoRecompute(ActivationCheckpoint):
    """Every activation that backward needs is saved."""


class Recompute(ActivationCheckpoint):
    """Base class of the options that wrap blocks."""

    early_stop: bool
    """Stop recomputing once backward has what it needs, not at the end of the block."""
    determinism_check: bool
    """Compare shape, dtype and device of recomputed tensors with those of forward; a mismatch is an error."""

    @property
    def repeats_exchange(self) -> bool:
        return True

    def recomputes(self, block: int) -> bool:
        return True

    def wrap(self, block: nn.Module, *, preserve_rng_state: bool, **how: Any) -> nn.Module:
        """Return the checkpointed block. how: additional arguments of torch's checkpoint_wrapper."""
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        return checkpoint_wrapper(
            block,
            preserve_rng_state=preserve_rng_state,
            early_stop=self.early_stop,
            determinism_check="default" if self.determinism_check else "none",
            **how,
        )


class Full(Recompute):
    """Only the input of each block is saved: the least memory, at the cost of one more forward."""


class SelectiveLayer(Recompute):
    """Every k-th block is recomputed, the others save all their activations."""

    every: Count
    """One in this many blocks is recomputed, beginning with the first; 1: all blocks."""

    def recomputes(self, block: int) -> bool:
        return block % self.every == 0


class MemoryBudget(ActivationCheckpoint):
    """The compiler chooses what to save within a memory budget (functorch's knapsack partitioner)."""

    budget: float = Field(ge=0, le=1)
    """Fraction of the activation memory that compiled code saves by default; 0: recompute all, 1: no change."""

    def configure(self) -> None:
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = self.budget

    def recomputes(self, block: int) -> bool:
        return self.budget < 1

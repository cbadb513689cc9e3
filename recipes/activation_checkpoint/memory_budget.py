"""Activation checkpointing by the compiler: it keeps what is worth most within a budget of memory."""

from __future__ import annotations

from pydantic import Field

from recipes.activation_checkpoint.base import ActivationCheckpoint


class MemoryBudget(ActivationCheckpoint):
    """Works on what is compiled, so it needs `compile` other than eager (functorch's knapsack partitioner)."""

    budget: float = Field(ge=0, le=1)
    """Part of the activations that backward would keep anyway under compilation; 0: recompute all, 1: change nothing."""

    def configure(self) -> None:
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = self.budget

    def recomputes(self, block: int) -> bool:
        return self.budget < 1

"""Selective activation checkpointing by layer: every k-th block is recomputed as a whole, the others keep everything."""

from recipes.activation_checkpoint.base import Recompute
from recipes.option import Count


class SelectiveLayer(Recompute):
    """Memory and recomputation are traded in steps of one block."""

    every: Count
    """Of so many consecutive blocks the first is recomputed; 1: all of them."""

    def recomputes(self, block: int) -> bool:
        return block % self.every == 0

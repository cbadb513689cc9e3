"""Hybrids: the network is in `hybrid_transformer`, its shape in `hybrid_shape`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrunner.recipes.model.hybrid.shape import HybridShape

if TYPE_CHECKING:
    from meshrunner.recipes.model.hybrid.transformer import HybridTransformer


class Hybrid(HybridShape):
    """A decoder with one mixer or network a block: Nemotron-H, Jamba, the hybrids of Megatron-LM."""

    def network(self, seq_len: int) -> HybridTransformer:
        from meshrunner.recipes.model.hybrid.transformer import HybridTransformer

        return HybridTransformer(self, seq_len)

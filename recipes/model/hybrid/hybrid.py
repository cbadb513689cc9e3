"""Hybrid decoders: the option of the `model` group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrunner.recipes.model.hybrid.hybrid_decoder import HybridDecoder

if TYPE_CHECKING:
    from meshrunner.recipes.model.hybrid.hybrid_transformer import HybridTransformer


class Hybrid(HybridDecoder):
    """A decoder whose blocks each hold one mixer or one feed-forward network: Nemotron-H, Jamba, Megatron-LM's hybrids."""

    def network(self, seq_len: int) -> HybridTransformer:
        from meshrunner.recipes.model.hybrid.hybrid_transformer import HybridTransformer

        return HybridTransformer(self, seq_len)

"""Llama 2 and 3: the network is in `transformer`, its shape in `shape`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrunner.recipes.model.shape import DecoderShape

if TYPE_CHECKING:
    from meshrunner.recipes.model.transformer import Transformer


class Llama(DecoderShape):
    """RMSNorm, rotary grouped-query attention and SwiGLU (Touvron et al. 2023; Llama team 2024)."""

    def network(self, seq_len: int) -> Transformer:
        from meshrunner.recipes.model.transformer import Transformer

        return Transformer(self, seq_len)

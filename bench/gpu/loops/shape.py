"""The shape of the hand-written Llama. This module does not import torch."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Dimensions of a Llama. Their names are the keys of meshrunner's config group `model`."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    tie_embeddings: bool = False
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5

    def flops_per_token(self, parameters: int, seq_len: int) -> int:
        """Return training FLOPs per token: 6 x matmul parameters + 12 x layers x dim x seq_len (Chowdhery 2022, appendix B)."""
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return 6 * (parameters - looked_up) + 12 * self.n_layers * self.dim * seq_len

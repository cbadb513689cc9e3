"""A user's model, whose copies get faults and neutral changes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrunner.recipes.model.base import Flops, Model
from meshrunner.recipes.model.network import ONES, Initial, Network, TruncatedNormal


class GPT(Model):
    """A small GPT with learned positions, which are not trained."""

    dim: int
    n_layers: int
    n_heads: int

    def network(self, seq_len: int) -> GPTNetwork:
        return GPTNetwork(self, seq_len)

    def flops_per_token(self, seq_len: int) -> Flops:
        weights = 12 * self.n_layers * self.dim**2 + self.vocab_size * self.dim
        attention = 12 * self.n_layers * self.dim * seq_len
        return Flops(6 * weights + attention, attention)


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        heads = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class GPTNetwork(Network):
    """Embeddings, blocks, norm, output projection."""

    def __init__(self, config: GPT, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(seq_len, config.dim)
        self.positions.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(config.dim, config.n_heads) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.output(x) if targets is None else self.loss(self.output, x, targets)

    def block_names(self) -> list[str]:
        return [f"blocks.{i}" for i in range(len(self.blocks))]

    def initial(self, name: str) -> Initial:
        if name.endswith("norm.weight"):
            return ONES
        residual = name.endswith(("out.weight", "down.weight"))
        return TruncatedNormal(0.02 / math.sqrt(2 * self.config.n_layers) if residual else 0.02)

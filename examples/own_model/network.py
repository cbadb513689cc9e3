"""The module of `gpt.GPT`. A constructor and three methods suffice for DDP and FSDP: see `Network`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrunner.recipes.model.network import ONES, Initial, Network, TruncatedNormal

if TYPE_CHECKING:
    from examples.own_model.gpt import GPT


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

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
        """Apply the block. x and the result: [batch, seq, dim]."""
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        heads = (
            t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v)
        )  # [batch, heads, seq, head_dim]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class GPTNetwork(Network):
    """Token and position embeddings, blocks, norm, output projection."""

    def __init__(self, config: GPT, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(seq_len, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.n_heads) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or the loss if there are targets. The loss is computed here, while FSDP holds the whole projection."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.output(x) if targets is None else self.loss(self.output, x, targets)

    def block_names(self) -> list[str]:
        """Return the names of the modules that are wrapped, recomputed and compiled one by one."""
        return [f"blocks.{i}" for i in range(len(self.blocks))]

    def initial(self, name: str) -> Initial:
        """Return a parameter's distribution, chosen by name, so that every layout draws the same values."""
        if name.endswith("norm.weight"):
            return ONES
        residual = name.endswith(("out.weight", "down.weight"))
        return TruncatedNormal(0.02 / math.sqrt(2 * self.config.n_layers) if residual else 0.02)

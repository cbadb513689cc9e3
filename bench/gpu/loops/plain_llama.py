"""A hand-written Llama for `plain_loop`. It uses no code of meshrunner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from bench.gpu.loops.shape import Shape


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to x, [batch, seq, heads, head_dim]. Entries i and i + head_dim / 2 form a rotated pair."""
    one, other = x.float().chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.n_heads
        self.grouped = shape.n_kv_heads != shape.n_heads
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)) for each in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w2 = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Recomputed(nn.Module):
    """A block that saves its input and the results that `saves` selects. Backward recomputes all other results."""

    def __init__(self, block: nn.Module, saves: Callable[[], Any]) -> None:
        super().__init__()
        self.block, self.saves = block, saves

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=self.saves)


def saves_every_second_matmul() -> Any:
    """Return contexts for torchtitan's selective recomputation, which saves the results of attention and every second matmul."""
    attention = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    kept = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in attention}
    matmuls: Counter[bool] = Counter()

    def decide(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            return (
                CheckpointPolicy.MUST_SAVE if matmuls[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
            )
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy, computed in fp32 and averaged over tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainLlama(nn.Module):
    """A Llama whose parameters have the same names as in meshrunner's Llama."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.output = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.loss = cross_entropy
        half = shape.dim // shape.n_heads // 2
        frequencies = shape.rope_theta ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(seq_len), frequencies).unsqueeze(1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(shape)

    @torch.no_grad()
    def _initialise(self, shape: Shape) -> None:
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name in ("tok_embeddings.weight", "output.weight"):
                weight.normal_(0.0, shape.dim**-0.5)
            else:
                into_residual = name.endswith(("wo.weight", "w2.weight"))
                weight.normal_(0.0, 0.02 / math.sqrt(2 * shape.n_layers) if into_residual else 0.02)

    def prepare(self, recompute: str, compile: str) -> None:
        """Set up recomputation (`none`, `full` or `selective_op`) and compilation (`eager`, or `per_block`: blocks and loss)."""
        how = {"backend": "inductor", "fullgraph": True, "dynamic": False}
        for number, block in enumerate(self.layers):
            if recompute == "full":
                if compile == "per_block":
                    block.compile(**how)
                self.layers[number] = Recomputed(block, noop_context_fn)
                continue
            if recompute == "selective_op":
                self.layers[number] = block = Recomputed(block, saves_every_second_matmul)
            if compile == "per_block":
                block.compile(**how)
        if compile == "per_block":
            self.loss = torch.compile(cross_entropy, **how)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.loss(self.output(self.norm(x)), targets)

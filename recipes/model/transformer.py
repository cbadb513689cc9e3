"""The network of Llama 2 and 3. torch's tensor parallelism is imported inside functions, because its import takes a second."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrunner.recipes.loss.base import with_gradient_of
from meshrunner.recipes.model.documents import Documents, Rope, find_documents
from meshrunner.recipes.model.network import ONES, ZEROS, Initial, Network, TruncatedNormal

if TYPE_CHECKING:
    from meshrunner.recipes.model.context import Context
    from meshrunner.recipes.model.decoder import Decoder, RopeScaling
    from meshrunner.recipes.model.tensor_plan import TensorPlan


def in_compute_dtype(x: Tensor) -> Tensor:
    """Return x in the compute dtype of blocks. Only autocast needs this cast, because FSDP casts the parameters instead."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in x's dtype. Under autocast, F.rms_norm would return fp32."""
    shape = (x.shape[-1],)
    if not torch.is_autocast_enabled(x.device.type):
        return F.rms_norm(x, shape, weight, eps)
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, shape, None if weight is None else weight.to(x.dtype), eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""

    # Do not derive from nn.RMSNorm: `meshrunner plan` cannot trace nn.RMSNorm with compile=whole_model.
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        """Return SequenceParallel if the sequence is sharded, else no style. Each rank always gets the full weight gradient."""
        from torch.distributed.tensor.parallel import SequenceParallel

        return {"": SequenceParallel()} if sequence_parallel else {}


class HeadNorm(RMSNorm):
    """RMSNorm of each attention head. x: [batch, seq, heads, head_dim]."""

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        """Return a style for heads that are split over ranks. The weight's gradient is summed over the ranks."""
        from torch.distributed.tensor.parallel import SequenceParallel

        return {"": SequenceParallel(sequence_dim=2, use_local_output=True)}


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the rotation angle of each pair of elements, in radians per position: [head_dim / 2], fp32, on the CPU. The order of
    operations is the same as in transformers' `_compute_llama3_parameters`, so that rounding is equal. At position 8,000, a
    change in the last bit of a frequency near 1 changes the angle by half a thousandth of a radian."""
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    if scaling is None:
        return freqs
    length, low, high = scaling.original_seq_len, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / freqs
    # Slow down pairs that rotate only a few times within the original length, and interpolate pairs between the two bounds.
    slow = wavelength > length / low
    scaled = torch.where(slow, freqs / scaling.factor, freqs)
    keep = (length / wavelength - low) / (high - low)
    between = (1 - keep) * scaled / scaling.factor + keep * scaled
    return torch.where((wavelength >= length / high) & ~slow, between, scaled)


def rope_table(head_dim: int, seq_len: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Return the cosines and signed sines that `rotate` uses at each position, [seq_len, 2, head_dim], fp32."""
    freqs = rope_frequencies(head_dim, theta, scaling).to(device)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), freqs)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate elements i and i + head_dim / 2 of each head by their angle at the token's position (Su et al. 2021), in fp32. The
    transformers library pairs the same elements. Llama's original code pairs adjacent elements, which is equivalent if the rows
    of the query and key weights are reordered. x: [batch, seq, heads, head_dim]; rope: rows of `rope_table`, [seq, 2, head_dim]
    or [batch, seq, 2, head_dim]."""
    cos, sin = rope.unsqueeze(-3).unbind(-2)
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).flatten(-2)
    # Do not use addcmul, which rounds only once. Rounding twice makes fp32 logits bit-equal to those of transformers.
    return (x * cos).add_(swapped * sin).type_as(x)


def lacks_grouped_kernel(query: Tensor, masked: bool) -> bool:
    """Whether torch lacks a fused grouped-query attention kernel for `query`. torch's fallback stores full score matrices."""
    # Flash and cuDNN attention need 16 bits, flash attention takes no mask, and memory-efficient attention needs as many key
    # heads as query heads (`can_use_mem_efficient_attention` in torch's sdp_utils.cpp, up to 2.13).
    return query.is_cuda and (masked or query.dtype == torch.float32)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023), with or without rotary position embeddings."""

    context: Context | None = None
    """See `Network.context`."""

    def __init__(self, config: Decoder) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.queries_per_key = config.n_heads // config.n_kv_heads
        q_dim, kv_dim = config.n_heads * self.head_dim, config.n_kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(q_dim, config.dim, bias=False)
        self.q_norm = HeadNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = HeadNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """Attend within each sequence, or within each document if `rope` has documents. x: [batch, seq, dim]."""
        rope, mask = rope if isinstance(rope, Documents) else (rope, None)
        # [batch, seq, dim] -> [batch, seq, heads, head_dim]. `view` infers heads, because tensor parallelism splits them.
        q, k, v = (w(x).view(*x.shape[:-1], -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [batch, heads, seq, head_dim]
        grouped = self.queries_per_key > 1
        if grouped and lacks_grouped_kernel(q, mask is not None):
            k, v = (t.repeat_interleave(self.queries_per_key, dim=1) for t in (k, v))
            grouped = False
        if self.context is None:
            is_causal = mask is None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
        else:
            out = self.context.attend(q, k, v, grouped=grouped)
        return self.wo(out.transpose(1, 2).flatten(2))  # [batch, seq, dim]

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        from meshrunner.recipes.model.tensor_plan import matmul_styles

        return matmul_styles(("wq", "wk", "wv"), "wo", sequence_parallel, other_inputs=1)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        from meshrunner.recipes.model.tensor_plan import matmul_styles

        return matmul_styles(("w1", "w3"), "w2", sequence_parallel)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Decoder, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(Network):
    """Embedding, blocks, norm, output projection."""

    rope: Tensor | None = None
    """Rows of `rope_table` for this rank's positions, set by `reset_buffers`. Not a buffer, because DDP broadcasts buffers
    before every forward pass, even to ranks with other positions."""

    def __init__(self, config: Decoder, seq_len: int, blocks: Iterable[nn.Module] | None = None) -> None:
        """Build the network. blocks: the repeated modules; default: one `Block` with a dense feed-forward network per layer."""
        super().__init__()
        self.config, self.seq_len = config, seq_len
        if blocks is None:
            blocks = (Block(config, FeedForward(config.dim, config.ffn_dim)) for _ in range(config.n_layers))
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.forward_part(range(self.config.n_layers), tokens, targets)

    def forward_part(self, blocks: range, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run some blocks. The balance loss changes the gradient, but not the result."""
        tokens, is_first = x, blocks.start == 0
        if is_first:
            x = in_compute_dtype(self.tok_embeddings(x))
        rope = self.positions(tokens if is_first or targets is None else targets, x.dtype)
        x, balance = self.through_blocks(blocks, x, rope, count=targets is not None)
        if blocks.stop < self.config.n_layers:
            return x
        x = self.norm(x)
        return self.output(x) if targets is None else with_gradient_of(self.loss(self.output, x, targets), balance)

    def through_blocks(self, blocks: range, x: Tensor, rope: Rope, *, count: bool) -> tuple[Tensor, Tensor | None]:
        """Return the last block's output and the weighted balance loss (0-d or None). count: whether to count routed tokens."""
        for number in blocks:
            x = self.layers[str(number)](x, rope)
        return x, None

    def stream_shape(self, batch: int, seq: int) -> tuple[int, ...]:
        return batch, seq, self.config.dim

    def positions(self, tokens: Tensor, dtype: torch.dtype) -> Rope:
        """Return the positions of tokens, [batch, seq], with their documents if documents are separate. dtype: compute dtype."""
        assert self.rope is not None or self.config.rope_theta is None, "reset_buffers was not called"
        rope = None if self.rope is None else self.rope[: tokens.shape[1]]
        return rope if self.document_end is None else find_documents(tokens, self.document_end, rope, dtype)

    def tensor_plan(self, sequence_parallel: bool, loss_parallel: bool) -> TensorPlan:
        """Return the plan that splits the vocabulary and every module that has a method `styles`."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from meshrunner.recipes.model.tensor_plan import stream_placement

        stream = stream_placement(sequence_parallel)
        plan: TensorPlan = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "output": ColwiseParallel(
                input_layouts=stream,
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        }
        for name, module in self.named_modules():
            if styles := getattr(module, "styles", None):
                plan |= {f"{name}.{part}".strip("."): style for part, style in styles(sequence_parallel).items()}
        return plan

    def tie_weights(self) -> None:
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def block_names(self) -> list[str]:
        return [f"layers.{number}" for number in self.layers]

    def initial(self, name: str) -> Initial:
        if name.endswith("norm.weight"):
            return ONES
        if name.endswith(".bias"):
            return ZEROS
        if name in ("tok_embeddings.weight", "output.weight"):
            return TruncatedNormal(self.config.dim**-0.5)
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            return self.initial_into_stream()
        return TruncatedNormal(0.02)

    def initial_into_stream(self) -> Initial:
        """Return the initial distribution of weights that write to the residual stream (GPT-2, Radford et al. 2019)."""
        # The variance of the stream should not grow with depth.
        return TruncatedNormal(0.02 / math.sqrt(2 * self.config.n_layers))

    def reset_buffers(self) -> None:
        c = self.config
        if c.rope_theta is not None:
            device = torch.get_default_device()
            self.rope = self.own(rope_table(c.head_width, self.seq_len, c.rope_theta, c.rope_scaling, device), 0)

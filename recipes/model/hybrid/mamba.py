"""Mamba-2 in plain torch: state-space duality, computed chunk by chunk (Dao and Gu 2024, arXiv 2405.21060).

Each head h has a state S, [head_dim, state]. S is 0 before the first token of a sequence. For each token t:

    S_t = exp(dt_t A_h) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D_h x_t.

The projections to x, B, C, dt and the gate z are separate modules, and each convolution is a module. Tensor parallelism can
therefore split each module by heads or by groups. The heads of a group are contiguous and share B and C.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrunner.recipes.model.context import Context
from meshrunner.recipes.model.hybrid import mamba_kernel
from meshrunner.recipes.model.hybrid.hybrid import MambaConfig
from meshrunner.recipes.model.init_weights import local_part
from meshrunner.recipes.model.tensor_plan import SplitParameters, TensorPlan, matmul_styles
from meshrunner.recipes.model.transformer import rms_norm


class Mamba(nn.Module):
    """A Mamba-2 mixer, which replaces attention."""

    context: Context | None = None
    """See `Network.context`. Each rank gathers the projected tokens, and scans whole sequences."""

    def __init__(self, dim: int, config: MambaConfig, norm_eps: float) -> None:
        super().__init__()
        inner, state = config.inner, config.groups * config.state
        self.wz = nn.Linear(dim, inner, bias=False)
        self.wx = nn.Linear(dim, inner, bias=False)
        self.wb = nn.Linear(dim, state, bias=False)
        self.wc = nn.Linear(dim, state, bias=False)
        self.wdt = nn.Linear(dim, config.heads, bias=False)
        self.scan = Scan(config, norm_eps)
        self.wo = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of each sequence. x and the result: [batch, seq, dim]."""
        projected = tuple(w(x) for w in (self.wz, self.wx, self.wb, self.wc, self.wdt))
        if self.context is None:
            return self.wo(self.scan(*projected))
        whole = self.context.whole(torch.cat(projected, -1), 1)
        y = self.scan(*torch.split(whole, [each.shape[-1] for each in projected], -1))
        return self.wo(self.context.own(y, 1))

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        split = matmul_styles(("wz", "wx", "wb", "wc", "wdt"), "wo", sequence_parallel)
        return {**split, "scan": SplitParameters({name: 0 for name, _ in self.scan.named_parameters()})}


class CausalConvolution(nn.Module):
    """A depthwise convolution over the current and the previous `width` - 1 tokens, followed by SiLU."""

    def __init__(self, channels: int, width: int, *, fused: bool = False) -> None:
        """fused: whether to use the package causal_conv1d if it supports the sizes."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels))
        self.fused = fused and 2 <= width <= 4

    def forward(self, x: Tensor) -> Tensor:
        """Convolve over the sequence. x: [batch, seq, channels], with only this rank's channels under tensor parallelism."""
        weight, bias = local_part(self.weight), local_part(self.bias)
        # In some versions of causal_conv1d, the weight gradient is not deterministic.
        if self.fused and weight.shape[0] % 8 == 0 and not torch.are_deterministic_algorithms_enabled():
            return mamba_kernel.convolution(x, weight, bias)
        return _Convolution.apply(x, weight, bias)  # type: ignore[no-untyped-call]


class _Convolution(torch.autograd.Function):
    """A convolution by shifted multiply-adds, which a compiler fuses. cuDNN has no fast depthwise convolution in bf16. Sums are
    in fp32 or wider. Backward recomputes the sums from x, which is the only saved activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        # Without `copy`, torch 2.11 loses all gradients of a compiled Function if `to` returns its input (pytorch #180642).
        return F.silu(_convolved(_shifted(x, weight.shape[1] - 1, 0), weight, bias)).to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = ctx.saved_tensors
        before = weight.shape[1] - 1
        shifted = _shifted(x, before, 0)
        sums = _convolved(shifted, weight, bias)
        sigmoid = sums.sigmoid()
        gradient = _at_least_fp32(gradient) * sigmoid * (1 + sums * (1 - sigmoid))
        of_weight = torch.stack([(gradient * each).sum((0, 1)) for each in shifted], 1)
        # Token t contributes to the tokens t to t + width - 1.
        of_x = _convolved(_shifted(gradient, 0, before), weight.flip(1), torch.zeros_like(bias))
        return of_x.to(x.dtype), of_weight.to(weight.dtype), gradient.sum((0, 1)).to(bias.dtype)


def _shifted(x: Tensor, before: int, after: int) -> list[Tensor]:
    """Return one shifted copy of x for each offset k from `-before` to `after`. Token t of the copy is token t + k of x, or 0 if
    x has no such token. x: [batch, seq, channels]."""
    padded = _at_least_fp32(F.pad(x, (0, 0, before, after)))
    return [padded[:, k : k + x.shape[1]] for k in range(before + after + 1)]


def _convolved(shifted: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    total = _at_least_fp32(bias)
    for each, factor in zip(shifted, _at_least_fp32(weight).unbind(1), strict=True):
        total = torch.addcmul(total, each, factor)
    return total


class Scan(nn.Module):
    """The layers between the input projections and the output projection: convolutions, recurrence and gated norm. No layer mixes
    heads of different groups, so tensor parallelism can split every layer."""

    def __init__(self, config: MambaConfig, norm_eps: float) -> None:
        super().__init__()
        self.config, self.norm_eps = config, norm_eps
        inner, state = config.inner, config.groups * config.state
        fused = config.fuses_convolution
        self.conv_x = CausalConvolution(inner, config.conv, fused=fused)
        self.conv_b = CausalConvolution(state, config.conv, fused=fused)
        self.conv_c = CausalConvolution(state, config.conv, fused=fused)
        self.a_log = nn.Parameter(torch.empty(config.heads))
        self.dt_bias = nn.Parameter(torch.empty(config.heads))
        self.d = nn.Parameter(torch.empty(config.heads))
        self.norm = nn.Parameter(torch.empty(inner))

    def forward(self, z: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        """Mix the tokens. x, z and the result: [batch, seq, heads x head_dim]; b, c: [.., groups x state]; dt: [.., heads]."""
        config = self.config
        x, b, c = self.conv_x(x), self.conv_b(b), self.conv_c(c)
        x = x.view(*x.shape[:2], -1, config.head_dim)  # [batch, seq, heads, head_dim]
        b, c = (part.view(*part.shape[:2], -1, config.state) for part in (b, c))  # [batch, seq, groups, state]
        dt = F.softplus(_at_least_fp32(dt) + _at_least_fp32(local_part(self.dt_bias)))
        a, d = -_at_least_fp32(local_part(self.a_log)).exp(), local_part(self.d)
        if config.kernel == "fused":
            y = mamba_kernel.scan(x, dt, a, b, c, d, config.chunk)
        else:
            with torch.autocast(x.device.type, enabled=False):
                y = scan((x * dt.unsqueeze(-1)).to(x.dtype), dt * a, b, c, config.chunk)
                y = y + x * d.unsqueeze(-1).to(x.dtype)
        # Apply a gated RMSNorm to each group separately, because tensor parallelism does not split groups.
        y, width = y.flatten(2), self.norm.shape[0] // config.groups
        groups = (y * F.silu(z)).view(*y.shape[:-1], -1, width)
        return rms_norm(groups, None, self.norm_eps).flatten(2) * local_part(self.norm).to(y.dtype)


def scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Compute S_t = exp(decay_t) S_{t-1} + x_t b_t^T, y_t = S_t c_t with matmuls over chunks (section 6 of the paper). x and y:
    [batch, seq, heads, head_dim]; decay: not positive, [batch, seq, heads]; b, c: [batch, seq, groups, state]; chunk: tokens per
    chunk, which need not divide seq. fp64 decays are summed in fp64, other decays in fp32."""
    batch, seq, heads, head_dim = x.shape
    groups = b.shape[2]
    if missing := -seq % chunk:
        x, decay, b, c = (F.pad(part, (0, 0) * (part.dim() - 2) + (0, missing)) for part in (x, decay, b, c))
    # In shapes, b: batch, n and m: chunks, i and j: tokens of a chunk, g: groups, r: heads of a group, p: head_dim, s: state.
    x = x.view(batch, -1, chunk, groups, heads // groups, head_dim)  # [b n i g r p]
    b, c = (part.view(batch, -1, chunk, *part.shape[2:]) for part in (b, c))  # [b n i g s]
    decay = _at_least_fp32(decay).view(batch, -1, chunk, groups, heads // groups)
    total = _running_sums(decay, 2)  # since the chunk began, [b n i g r]
    # Within a chunk, token i reads the tokens j <= i. Each token j is decayed by the steps between j and i.
    within = _decays(total, total)  # [b n g r i j]
    scores = torch.einsum("bnigs,bnjgs->bngij", c, b)
    y = torch.einsum("bngrij,bnjgrp->bnigrp", scores.unsqueeze(3) * within.to(x.dtype), x)
    # Across chunks: `added` is the state that each chunk adds by its end. The state at the beginning of a chunk is the
    # sum of earlier chunks' `added`, decayed over the chunks in between. One matmul with a matrix of decays computes all states.
    last = total[:, :, -1:]
    added = torch.einsum("bnjgs,bnjgrp->bngrps", b, x * (last - total).exp().unsqueeze(-1).to(x.dtype))
    ends = _running_sums(last.squeeze(2), 1).unsqueeze(1)  # since the sequence began, [b 1 n g r]
    begins = F.pad(ends, (0, 0, 0, 0, 1, -1))
    # From the end of chunk m to the beginning of chunk n, [b g r n m].
    between = _decays(begins, ends, strictly=True).squeeze(1)
    states = torch.einsum("bgrnm,bmgrps->bngrps", between, added.to(between.dtype)).to(x.dtype)
    y = y + torch.einsum("bnigs,bngrps->bnigrp", c, states) * total.exp().unsqueeze(-1).to(x.dtype)
    return y.reshape(batch, -1, heads, head_dim)[:, :seq]


def _running_sums(x: Tensor, dim: int) -> Tensor:
    """Return x.cumsum(dim). For floats on a GPU, torch's cumsum raises an error under `deterministic=true`."""
    shift = 1
    while shift < x.shape[dim]:  # each round doubles the number of elements that a sum includes
        x = x + F.pad(x.narrow(dim, 0, x.shape[dim] - shift), (*(0, 0) * (x.dim() - 1 - dim), shift, 0))
        shift *= 2
    return x


def _decays(to: Tensor, since: Tensor, *, strictly: bool = False) -> Tensor:
    """Return exp(to_i - since_j) where j <= i (j < i if `strictly`), else 0: [b n g r i j]. `to` and `since`: [b n i g r]."""
    to, since = (part.movedim(2, -1) for part in (to, since))
    length = to.shape[-1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=to.device).tril(-1 if strictly else 0)
    # Mask before exp: above the diagonal, exp overflows if decays are strong, and the gradient of exp would be nan.
    return (to.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~allowed, -torch.inf).exp()


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))

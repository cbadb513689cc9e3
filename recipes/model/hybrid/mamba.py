"""Mamba-2: state-space duality in chunks, in plain torch (Dao and Gu 2024, arXiv 2405.21060).

Of every head h, with a state S of [head_dim, state] that begins at 0, for the tokens t of a sequence:

    S_t = exp(dt_t A_h) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D_h x_t.

The projections of z, x, B, C and dt are separate modules, as are the convolutions, so that tensor parallelism can split each by
heads or by groups; heads of a group, which have B and C in common, are neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from meshrunner.recipes.model.hybrid.mamba_kernel import fused_scan
from meshrunner.recipes.model.tensor_plan import product_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.hybrid import shape as hybrid_shape
    from meshrunner.recipes.model.tensor_plan import TensorPlan


class Mamba(nn.Module):
    """A mixer in the place of attention."""

    def __init__(self, dim: int, config: hybrid_shape.Mamba, norm_eps: float) -> None:
        super().__init__()
        inner, state = config.heads * config.head_dim, config.groups * config.state
        self.wz = nn.Linear(dim, inner, bias=False)
        self.wx = nn.Linear(dim, inner, bias=False)
        self.wb = nn.Linear(dim, state, bias=False)
        self.wc = nn.Linear(dim, state, bias=False)
        self.wdt = nn.Linear(dim, config.heads, bias=False)
        self.scan = Scan(config, norm_eps)
        self.wo = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim]. Returns the same shape."""
        out: Tensor = self.wo(self.scan(self.wz(x), self.wx(x), self.wb(x), self.wc(x), self.wdt(x)))
        return out


class CausalConvolution(nn.Module):
    """Of every channel by itself over the last tokens, with SiLU behind it."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, channels], or of this rank's channels."""
        weight, bias = _local(self.weight).unsqueeze(1), _local(self.bias)
        out = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0)), weight, bias, groups=weight.shape[0])
        return F.silu(out.transpose(1, 2))


class Scan(nn.Module):
    """What lies between the projections: convolutions, the recurrence, and the gated norm. All of it is by heads or groups."""

    def __init__(self, config: hybrid_shape.Mamba, norm_eps: float) -> None:
        super().__init__()
        self.config, self.norm_eps = config, norm_eps
        inner, state = config.heads * config.head_dim, config.groups * config.state
        self.conv_x = CausalConvolution(inner, config.conv)
        self.conv_b = CausalConvolution(state, config.conv)
        self.conv_c = CausalConvolution(state, config.conv)
        self.a_log = nn.Parameter(torch.empty(config.heads))
        self.dt_bias = nn.Parameter(torch.empty(config.heads))
        self.d = nn.Parameter(torch.empty(config.heads))
        self.norm = nn.Parameter(torch.empty(inner))

    def forward(self, z: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        """z, x: [batch, seq, heads x head_dim]; b, c: [batch, seq, groups x state]; dt: [batch, seq, heads]. Returns as z."""
        config = self.config
        x, b, c = self.conv_x(x), self.conv_b(b), self.conv_c(c)
        x = x.view(*x.shape[:2], -1, config.head_dim)
        b, c = (part.view(*part.shape[:2], -1, config.state) for part in (b, c))
        dt = F.softplus(_widened(dt) + _widened(_local(self.dt_bias)))
        a, d = -_widened(_local(self.a_log)).exp(), _local(self.d)
        if config.kernel == "fused":
            y = fused_scan(x, dt, a, b, c, d, config.chunk)
        else:
            with torch.autocast(x.device.type, enabled=False):
                y = scan((x * dt.unsqueeze(-1)).to(x.dtype), dt * a, b, c, config.chunk) + x * d.unsqueeze(-1).to(
                    x.dtype
                )
        return self._gated_norm(y.flatten(2), z)

    def _gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        """RMSNorm of y gated by z, of each group by itself: tensor parallelism leaves groups whole."""
        width = self.norm.shape[0] // self.config.groups
        groups = (y * F.silu(z)).view(*y.shape[:-1], -1, width)
        return F.rms_norm(groups, (width,), eps=self.norm_eps).flatten(2) * _local(self.norm).to(y.dtype)


class SplitHeads(ParallelStyle):
    """Tensor parallelism of a `Scan`: every rank has some of the heads and groups, and their parameters."""

    def split_dims(self, module: nn.Module) -> dict[str, int]:
        """Name of a parameter -> the dimension that is split."""
        return {name: 0 for name, _ in module.named_parameters()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            for name, whole in list(part.named_parameters(recurse=False)):
                split = distribute_tensor(whole, device_mesh, [Shard(0)], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))
        return module


def mamba_plan(name: str, sequence_parallel: bool) -> TensorPlan:
    """How tensor parallelism splits a `Mamba`."""
    into = ("wz", "wx", "wb", "wc", "wdt")
    return product_plan(name, into, "wo", sequence_parallel) | {f"{name}.scan": SplitHeads()}


def scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """
    The recurrence S_t = exp(decay_t) S_{t-1} + x_t b_t^T, y_t = S_t c_t, as products of chunks (section 6 of the paper).

    Args:
        x: [batch, seq, heads, head_dim].
        decay: not positive, [batch, seq, heads]; it is added up in fp32 at least.
        b, c: [batch, seq, groups, state].
        chunk: tokens that are multiplied with each other; any length of a sequence is right.

    Returns:
        y: as x.
    """
    batch, seq, heads, head_dim = x.shape
    groups = b.shape[2]
    if missing := -seq % chunk:
        x, decay, b, c = (F.pad(part, (0, 0) * (part.dim() - 2) + (0, missing)) for part in (x, decay, b, c))
    # b: batch, n: chunk, i and j: tokens of one, g: group, r: head of a group, p: head_dim, s: state.
    x = x.view(batch, -1, chunk, groups, heads // groups, head_dim)
    b, c = (part.view(batch, -1, chunk, *part.shape[2:]) for part in (b, c))
    total = (
        _widened(decay).view(batch, -1, chunk, groups, heads // groups).cumsum(2)
    )  # since the chunk began: [b n i g r]
    # Inside of a chunk a token reads those up to itself, each decayed by what lies between.
    within = _decays(total, total)  # [b n g r i j]
    scores = torch.einsum("bnigs,bnjgs->bngij", c, b)
    y = torch.einsum("bngrij,bnjgrp->bnigrp", scores.unsqueeze(3) * within.to(x.dtype), x)
    # What a chunk adds to the state at its end, and the state with which each begins: one product with a matrix of decays.
    last = total[:, :, -1:]
    added = torch.einsum("bnjgs,bnjgrp->bngrps", b, x * (last - total).exp().unsqueeze(-1).to(x.dtype))
    ends = last.squeeze(2).cumsum(1).unsqueeze(1)  # since the sequence began: [b 1 n g r]
    begins = F.pad(ends, (0, 0, 0, 0, 1, -1))
    between = _decays(begins, ends, strictly=True).squeeze(
        1
    )  # [b g r n m]: from the end of chunk m to the beginning of n
    states = torch.einsum("bgrnm,bmgrps->bngrps", between, added.to(between.dtype)).to(x.dtype)
    y = y + torch.einsum("bnigs,bngrps->bnigrp", c, states) * total.exp().unsqueeze(-1).to(x.dtype)
    return y.reshape(batch, -1, heads, head_dim)[:, :seq]


def _decays(to: Tensor, since: Tensor, *, strictly: bool = False) -> Tensor:
    """
    exp(to_i - since_j) for j <= i, or j < i, else 0. to, since: [b n i g r]. Returns [b n g r i j].

    Masked before exp: what is above the diagonal overflows where decays are strong, and its gradient would be nan.
    """
    to, since = (part.movedim(2, -1) for part in (to, since))
    length = to.shape[-1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=to.device).tril(-1 if strictly else 0)
    return (to.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~allowed, -torch.inf).exp()


def _widened(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of what tensor parallelism has split."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

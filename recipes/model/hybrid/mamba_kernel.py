"""The fused kernel of package mamba_ssm, for CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fused_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int) -> Tensor:
    """
    S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T, y_t = S_t c_t + d x_t.

    Args:
        x: [batch, seq, heads, head_dim].
        dt: behind softplus, [batch, seq, heads].
        a: negative, [heads].
        b, c: [batch, seq, groups, state].
        d: [heads].

    Returns:
        y: as x.
    """
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    y: Tensor = mamba_chunk_scan_combined(x, dt, a, b, c, chunk, D=d)
    return y

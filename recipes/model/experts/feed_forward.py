"""Mixture of experts in the place of a feed-forward network (Shazeer et al. 2017; DeepSeek-AI 2024, V3).

No token is dropped: rows are sorted by expert, multiplied group by group, and put back. A block returns its tokens per
expert, and the caller adds them up. A counter inside the block would count them twice when the block is recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshrunner.recipes.model.experts.exchange import (
    around_tensor_parallel,
    exchanged,
    inverse_of,
    permute,
    scale_gradient,
)
from meshrunner.recipes.model.experts.grouped_mm import grouped_mm, leaves_empty_groups, zero_gradient
from meshrunner.recipes.model.experts.router import Router
from meshrunner.recipes.model.transformer import FeedForward

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from meshrunner.recipes.model.decoder import Experts


class GroupedExperts(nn.Module):
    """The SwiGLU experts of a block that this rank holds, as stacks of matrices."""

    ranks = 1
    """Expert-parallel ranks. Gradients already contain the tokens of all of them; data parallelism averages over the rest."""

    def __init__(self, number: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(number, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(number, dim, ffn_dim))
        self.w2 = nn.Parameter(torch.empty(number, ffn_dim, dim))

    def forward(self, rows: Tensor, load: Tensor) -> Tensor:
        """Apply each expert to its rows. rows: [rows, dim], sorted by expert; load: rows of each expert, [experts], int64."""
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w3, self.w2)]
        if self.ranks > 1:
            weights = [scale_gradient(w, 1 / self.ranks) for w in weights]
        if leaves_empty_groups(rows.device):
            weights = [zero_gradient(w, load == 0) for w in weights]
        if torch.is_autocast_enabled(rows.device.type):  # autocast does not cover grouped matmuls
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, weights = rows.to(dtype), [w.to(dtype) for w in weights]
        w1, w3, w2 = weights
        ends = load.cumsum(0, dtype=torch.int32)
        return grouped_mm(F.silu(grouped_mm(rows, w1, ends)) * grouped_mm(rows, w3, ends), w2, ends)


class ExpertFeedForward(nn.Module):
    """A router, the experts it chooses from, and optionally a shared expert that every token passes through."""

    expert_group: ProcessGroup | None = None
    """Expert-parallel ranks, which hold different experts; None: this rank holds all."""
    tensor_group: ProcessGroup | None = None
    """Tensor-parallel ranks, which hold parts of every expert's width; None: this rank holds all of it."""
    sequence_parallel = False
    """Whether tensor parallelism shards input and output over the sequence."""

    def __init__(self, dim: int, config: Experts) -> None:
        super().__init__()
        self.per_token = config.per_token
        self.number = config.number
        self.router = Router(dim, config)
        self.experts = GroupedExperts(config.number, dim, config.ffn_dim)
        self.shared = FeedForward(dim, config.shared_ffn_dim) if config.shared_ffn_dim else None

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        Route tokens to experts and sum their weighted outputs.

        Args:
            x: [batch, seq, dim].
            bias: added to the scores that choose experts, [experts].

        Returns:
            The output, [batch, seq, dim]; tokens of each expert on this rank, [experts], int64; the balance loss, 0-d.
        """
        if self.tensor_group is None:
            return self._route(x, bias)
        return around_tensor_parallel(self._route, x, bias, self.tensor_group, sequence_parallel=self.sequence_parallel)

    def _route(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routed = self.router(x, bias)
        tokens = x.flatten(0, 1)  # [T, dim]
        # Each token has K choices. `order` sorts the T x K choices by expert, keeping the order of tokens.
        by_expert, order = routed.experts.flatten().sort(stable=True)
        inverse = inverse_of(order)
        ends = torch.searchsorted(by_expert, torch.arange(self.number, device=x.device), right=True)
        load = ends.diff(prepend=ends.new_zeros(1))  # [experts]
        rows = permute(tokens, order, inverse, self.per_token)  # [T x K, dim], sorted by expert
        results = permute(self._compute(rows, load), inverse, order)  # [T x K, dim], sorted by token
        weighted = results.view(len(tokens), self.per_token, -1).float() * routed.weights.unsqueeze(-1)  # [T, K, dim]
        y = weighted.sum(1).to(x.dtype).view_as(x)
        if self.shared is not None:
            y = y + self.shared(self._shared_input(x))
        return y, load, routed.balance

    def _shared_input(self, x: Tensor) -> Tensor:
        if self.tensor_group is None:
            return x
        # Under tensor parallelism the gradient of x is summed over ranks afterwards. The routed part contributes this rank's
        # share, but the shared expert's first layers have summed theirs already.
        return scale_gradient(x, 1 / self.tensor_group.size())

    def _compute(self, rows: Tensor, load: Tensor) -> Tensor:
        if self.expert_group is None:
            out: Tensor = self.experts(rows, load)
            return out
        return exchanged(self.experts, rows, load, self.expert_group)

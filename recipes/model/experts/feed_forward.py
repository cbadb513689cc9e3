"""Experts: a feed-forward network of which every token passes a part (Shazeer et al. 2017; DeepSeek-AI 2024, V3).

No token is dropped: rows are sorted by expert, multiplied group by group, and put back. How many tokens each expert had leaves
the block as a result and is added up outside: a counter in a block would count again when the block is recomputed.
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

    from meshrunner.recipes.model.experts.shape import Experts


class GroupedExperts(nn.Module):
    """The SwiGLU experts of a block, or those that lie on this rank, as stacks of matrices."""

    ranks = 1
    """Expert-parallel ranks. A gradient has the tokens of them all already, data parallelism averages over the others only."""

    def __init__(self, number: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(number, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(number, dim, ffn_dim))
        self.w2 = nn.Parameter(torch.empty(number, ffn_dim, dim))

    def forward(self, rows: Tensor, load: Tensor) -> Tensor:
        """rows: [sum of load, dim], sorted by expert; load: rows of each expert, [experts], int64. Returns [rows, dim]."""
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w3, self.w2)]
        if self.ranks > 1:
            weights = [scale_gradient(w, 1 / self.ranks) for w in weights]
        if leaves_empty_groups(rows.device):
            weights = [zero_gradient(w, load == 0) for w in weights]
        if torch.is_autocast_enabled(rows.device.type):  # it does not know grouped products
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, weights = rows.to(dtype), [w.to(dtype) for w in weights]
        w1, w3, w2 = weights
        ends = load.cumsum(0, dtype=torch.int32)
        return grouped_mm(F.silu(grouped_mm(rows, w1, ends)) * grouped_mm(rows, w3, ends), w2, ends)


class ExpertFeedForward(nn.Module):
    """A router, the experts it chooses from and, if there is one, the shared expert: what a block has to feed forward."""

    expert_group: ProcessGroup | None = None
    """Expert-parallel ranks, which hold different experts; None: this rank holds all."""
    tensor_group: ProcessGroup | None = None
    """Tensor-parallel ranks, which hold parts of every expert's width; None: this rank holds all of it."""
    sequence_parallel = False
    """With tensor parallelism: input and output are sharded over the sequence."""

    def __init__(self, dim: int, config: Experts) -> None:
        super().__init__()
        self.per_token = config.per_token
        self.number = config.number
        self.router = Router(dim, config)
        self.experts = GroupedExperts(config.number, dim, config.ffn_dim)
        self.shared = FeedForward(dim, config.shared_ffn_dim) if config.shared_ffn_dim else None

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            x: [batch, seq, dim].
            bias: of the choice, [experts].

        Returns:
            The output, [batch, seq, dim]; tokens of each expert on this rank, [experts], int64; the balance loss, 0-d.
        """
        if self.tensor_group is None:
            return self._route(x, bias)
        return around_tensor_parallel(self._route, x, bias, self.tensor_group, sequence_parallel=self.sequence_parallel)

    def _route(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routed = self.router(x, bias)
        tokens = x.flatten(0, 1)
        by_expert, order = routed.experts.flatten().sort(stable=True)
        inverse = inverse_of(order)
        ends = torch.searchsorted(by_expert, torch.arange(self.number, device=x.device), right=True)
        load = ends.diff(prepend=ends.new_zeros(1))
        rows = permute(tokens, order, inverse, self.per_token)
        results = permute(self._compute(rows, load), inverse, order)
        choices = results.view(len(tokens), self.per_token, -1).float() * routed.weights.unsqueeze(-1)
        y = choices.sum(1).to(x.dtype).view_as(x)
        if self.shared is not None:
            y = y + self.shared(self._shared_input(x))
        return y, load, routed.balance

    def _shared_input(self, x: Tensor) -> Tensor:
        if self.tensor_group is None:
            return x
        # Its first products hand back the gradient summed over the ranks, the routed part this rank's share of it.
        return scale_gradient(x, 1 / self.tensor_group.size())

    def _compute(self, rows: Tensor, load: Tensor) -> Tensor:
        if self.expert_group is None:
            out: Tensor = self.experts(rows, load)
            return out
        return exchanged(self.experts, rows, load, self.expert_group)

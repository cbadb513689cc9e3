"""The router: which experts each token is sent to, and how much each of them counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrunner.recipes.model.experts.exchange import sum_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from meshrunner.recipes.model.decoder import Experts


class Routed(NamedTuple):
    """The choice of K experts for each of T tokens."""

    weights: Tensor
    """[T, K], fp32."""
    experts: Tensor
    """Indices of the experts, [T, K], int64."""
    balance: Tensor
    """The balance loss before it is weighted, 0-d, fp32; 0 if it is not used."""


class Router(nn.Module):
    """Scores every expert for every token, in fp32 at any precision, and picks the best. FSDP shards its weight as usual."""

    tensor_group: ProcessGroup | None = None
    """Tensor-parallel ranks, all of which route all tokens and hold the whole weight; None: no tensor parallelism."""

    def __init__(self, dim: int, config: Experts) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.number, dim))

    def forward(self, x: Tensor, bias: Tensor) -> Routed:
        """Choose and weigh experts. x: [batch, seq, dim]; bias: added to the scores that choose, not that weigh, [experts]."""
        config, weight = self.config, self.weight.float()
        if self.tensor_group is not None:
            weight = sum_gradient(weight, self.tensor_group)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), weight)  # [batch, seq, experts]
        scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
        experts = torch.topk(scores.detach() + bias, config.per_token, dim=-1, sorted=False).indices  # [batch, seq, K]
        weights = scores.gather(-1, experts)
        if config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        balance = balance_loss(scores, experts) if config.balance == "sequence_loss" else scores.new_zeros(())
        return Routed((weights * config.route_scale).flatten(0, 1), experts.flatten(0, 1), balance)


def balance_loss(scores: Tensor, experts: Tensor) -> Tensor:
    """
    Return the sequence-wise balance loss, unweighted, averaged over sequences (DeepSeek-AI 2024, V3, equations 17 to 20).

    It is the sum over experts of f x P. f is the expert's share of a sequence's choices times the number of experts, and has
    no gradient. P is the mean over the sequence of its scores, normalised to sum to 1 for each token. Equal loads give 1.

    Args:
        scores: [batch, seq, number of experts].
        experts: indices of the chosen ones, [batch, seq, K].
    """
    number, per_token = scores.shape[-1], experts.shape[-1]
    chosen = torch.zeros_like(scores).scatter_(-1, experts, 1.0)
    frequency = chosen.mean(1) * (number / per_token)  # f: [batch, experts]
    probability = (scores / scores.sum(-1, keepdim=True)).mean(1)  # P: [batch, experts]
    return (frequency * probability).sum(-1).mean()

"""Load balance of experts: the tokens counted in a step, the figures reported of them, and the biases that even them out."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Loads:
    """
    Tokens per expert on this rank since the last optimizer step.

    A network with experts adds to it in every training forward, outside the recomputed code, so that each token is counted
    once. It is not a module and its tensors are not buffers, because DDP overwrites buffers with those of rank 0.
    """

    def __init__(self, bias: Tensor, bias_rate: float) -> None:
        self.bias, self.bias_rate = bias, bias_rate
        """The buffer added to the scores that choose experts, [blocks with experts, experts], and its step size, or 0."""
        self.tokens = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
        self.groups: tuple[dist.ProcessGroup, ...] = ()
        """Process groups over which tokens are added up: the ranks with other data, one group per mesh dimension."""
        self.expert_ranks = 1
        """Expert-parallel ranks. Each holds the same number of neighbouring experts."""

    def add(self, tokens: Tensor) -> None:
        """Add the tokens per expert of one forward, [blocks, experts], int64."""
        with torch.no_grad():
            self.tokens += tokens


@torch.no_grad()
def balance(loads: Loads, finite: Tensor) -> dict[str, Tensor]:
    """
    Sum the loads over ranks, update the biases and restart the count. Call once per optimizer step; causes no sync.

    bias += rate x sign(mean load - load), per block (Wang et al. 2024, arXiv 2408.15664, algorithm 1). Like the parameters, it
    stays as it is if the gradient is not `finite`, 0-d, bool. Return figures of the step, 0-d, fp32, the same on all ranks. A
    block's violation is its largest load / the mean load - 1.
    """
    for group in loads.groups:
        dist.all_reduce(loads.tokens, group=group)
    total = loads.tokens.sum(-1, keepdim=True)
    if loads.bias_rate:
        # mean - load, multiplied by the number of experts to stay in integers, where equal loads compare equal
        below = torch.sign(total - loads.tokens * loads.tokens.shape[-1])
        loads.bias += torch.where(finite, loads.bias_rate * below, 0.0)
    violations = _violations(loads.tokens)
    figures = {
        "experts/max_violation": violations.amax(),
        "experts/mean_violation": violations.mean(),
        "experts/unused": (loads.tokens == 0).sum().float(),
    }
    if loads.expert_ranks > 1:
        by_rank = loads.tokens.view(len(loads.tokens), loads.expert_ranks, -1).sum(-1)  # [blocks, ranks]
        figures["experts/rank_violation"] = _violations(by_rank).amax()
    loads.tokens.zero_()
    return figures


def _violations(tokens: Tensor) -> Tensor:
    """Return the violation of each block, [blocks], fp32. tokens: [blocks, experts or ranks]."""
    share = tokens.float() / tokens.sum(-1, keepdim=True)
    return share.amax(-1) * tokens.shape[-1] - 1

"""How equally experts are busy: what was counted in a step, what is reported of it, and the biases that follow from it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Loads:
    """
    The tokens of every expert since the last optimizer step, on this rank.

    A network with experts has one and adds to it once in every forward that is trained on, outside of what is recomputed. It is
    no module and its tensors are no buffers, because DDP would overwrite them with those of rank 0 in every forward.
    """

    def __init__(self, bias: Tensor, bias_rate: float) -> None:
        """
        Args:
            bias: the network's buffer, added to the scores that choose experts, [blocks with experts, experts], fp32.
            bias_rate: step of the bias; 0: it does not change.
        """
        self.bias, self.bias_rate = bias, bias_rate
        self.tokens = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
        self.groups: tuple[dist.ProcessGroup, ...] = ()
        """The ranks that have other tokens: one group, or one for each dimension of the mesh."""
        self.expert_ranks = 1
        """Expert-parallel ranks, each of which holds as many neighbouring experts."""

    def add(self, tokens: Tensor) -> None:
        """What one forward counted: tokens of each expert, [blocks, experts], int64."""
        with torch.no_grad():
            self.tokens += tokens


@torch.no_grad()
def balance(loads: Loads, finite: Tensor) -> dict[str, Tensor]:
    """
    Once per optimizer step: add up the loads of all ranks, move the biases, and begin to count anew. Without a sync.

    bias += rate x sign(mean load - load), per block (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    Args:
        finite: whether the gradient is; if not, the biases stay as they are, like the parameters. 0-d, bool.

    Returns:
        Figures of the step, 0-d, fp32, the same on all ranks. Violation: the largest load of an expert of a block / the mean - 1.
    """
    for group in loads.groups:
        dist.all_reduce(loads.tokens, group=group)
    total = loads.tokens.sum(-1, keepdim=True)
    if loads.bias_rate:
        below = torch.sign(total - loads.tokens * loads.tokens.shape[-1])  # in whole numbers: equal is equal
        loads.bias += torch.where(finite, loads.bias_rate * below, 0.0)
    violations = _violations(loads.tokens)
    figures = {
        "experts/max_violation": violations.amax(),
        "experts/mean_violation": violations.mean(),
        "experts/unused": (loads.tokens == 0).sum().float(),
    }
    if loads.expert_ranks > 1:
        figures["experts/rank_violation"] = _violations(
            loads.tokens.view(len(loads.tokens), loads.expert_ranks, -1).sum(-1)
        ).amax()
    loads.tokens.zero_()
    return figures


def _violations(tokens: Tensor) -> Tensor:
    """tokens: [blocks, experts or ranks]. Returns [blocks], fp32."""
    share = tokens.float() / tokens.sum(-1, keepdim=True)
    return share.amax(-1) * tokens.shape[-1] - 1

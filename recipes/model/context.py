"""Context parallelism: the ranks of a group hold different parts of each sequence. Only the layers that mix tokens exchange data:
attention, Mamba blocks and multi-token prediction. Data parallelism averages gradients over these ranks, too, because the
ranks hold equal weights, or shards of equal weights."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.nn.attention.bias import causal_lower_right

AUTOGRAD_GATHER = ("all_gather_single_autograd", "all_gather_tensor_autograd")  # names since and before torch 2.13
_all_gather = next(getattr(collectives, name) for name in AUTOGRAD_GATHER if hasattr(collectives, name))
_wait: Callable[[Tensor], Tensor] = collectives.wait_tensor


class Context:
    """The ranks that share sequences, and the positions that each of them holds.

    With `allgather`, a sequence is cut into two chunks per rank. Rank r holds chunk r and the r-th chunk from the end, so that
    all ranks have the same number of (query, key) pairs under the causal mask. With `ulysses`, which divides attention by
    heads, a rank holds consecutive positions.
    """

    def __init__(self, group: ProcessGroup, method: str, seq_len: int) -> None:
        self.group, self.method, self.rank, self.ranks = group, method, group.rank(), group.size()
        self.chunks = self.rank, 2 * self.ranks - 1 - self.rank
        size = seq_len // (2 * self.ranks)
        # Make the masks here, because torch cannot make them inside a region that is checkpointed selectively.
        self.masks = [causal_lower_right(size, (chunk + 1) * size) for chunk in self.chunks]

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor with all positions along `dim`."""
        if self.method == "ulysses":
            return x.chunk(self.ranks, dim)[self.rank]
        chunks = x.chunk(2 * self.ranks, dim)
        return torch.cat([chunks[number] for number in self.chunks], dim)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather the parts of all ranks along `dim`, in the order of positions. Backward reduce-scatters the gradients."""
        parts = _wait(_all_gather(x.movedim(dim, 0).contiguous(), 0, self.group)).chunk(self.ranks)
        if self.method == "allgather":
            halves = [part.chunk(2) for part in parts]
            parts = (*(first for first, _ in halves), *(second for _, second in reversed(halves)))
        return torch.cat(parts).movedim(0, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
        """Attend to whole sequences. q, k, v and the result hold only this rank's positions: [batch, heads, seq / ranks,
        head_dim]. grouped: whether each key head serves several query heads."""
        return self._exchanging(q, k, v) if self.method == "ulysses" else self._gathering(q, k, v, grouped=grouped)

    def _gathering(self, q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
        """Gather keys and values (Llama team 2024, section 3.3.2). Each chunk of queries attends to a prefix of the keys."""
        keys, values = self.whole(torch.stack((k, v)), 3).unbind()
        mixed = []
        for queries, mask in zip(q.chunk(2, dim=2), self.masks, strict=True):
            k, v = (part[:, :, : mask.seq_len_kv] for part in (keys, values))
            mixed.append(F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=grouped))
        return torch.cat(mixed, dim=2)

    def _exchanging(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Give each rank all positions of some heads, then attend to whole sequences (Jacobs et al. 2023, DeepSpeed Ulysses)."""
        parts = [self._by_rank(each) for each in (q, k, v)]
        sizes = [part.shape[1] for part in parts]
        exchanged = self._exchange(torch.cat(parts, dim=1)).permute(2, 1, 0, 3, 4).flatten(2, 3)
        q, k, v = torch.split(exchanged, sizes, dim=1)  # [batch, heads / ranks, seq, head_dim]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=sizes[0] != sizes[1])
        mixed = torch.stack(mixed.chunk(self.ranks, dim=2)).transpose(1, 2)
        return self._exchange(mixed).flatten(0, 1).transpose(0, 1)  # [batch, heads, seq / ranks, head_dim]

    def _by_rank(self, x: Tensor) -> Tensor:
        """Group heads by rank: [batch, heads, seq / ranks, head_dim] -> [ranks, heads / ranks, batch, seq / ranks, head_dim]"""
        if x.shape[1] < self.ranks:  # several ranks use the same key head
            x = x.repeat_interleave(self.ranks // x.shape[1], dim=1)
        return torch.stack(x.chunk(self.ranks, dim=1)).transpose(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send part r of the first dimension, [ranks, ...], to rank r."""
        return _wait(collectives.all_to_all_single_autograd(x.contiguous(), None, None, self.group))


def split_sequences(network: nn.Module, group: ProcessGroup, method: str, seq_len: int) -> None:
    """Set the context of all modules that mix tokens, so that this rank trains on its part of each sequence."""
    context = Context(group, method, seq_len)
    for module in network.modules():
        if hasattr(module, "context"):
            module.context = context  # type: ignore[assignment]  # torch declares attributes to be tensors or modules

"""Multi-token prediction: modules after the last block, each predicting one token further (DeepSeek-AI 2024, V3, section 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshrunner.recipes.model.tensor_plan import norm_plan, stream_placement
from meshrunner.recipes.model.transformer import Block, RMSNorm

if TYPE_CHECKING:
    from meshrunner.recipes.model.decoder import Decoder
    from meshrunner.recipes.model.tensor_plan import TensorPlan

IGNORED = -100
"""The target that torch's cross entropy ignores."""


class PredictionBlock(nn.Module):
    """Predicts one token further than the module before it, from that module's stream and the embedding of the next token."""

    def __init__(self, config: Decoder, feed_forward: nn.Module) -> None:
        super().__init__()
        self.stream_norm = RMSNorm(config.dim, config.norm_eps)
        self.token_norm = RMSNorm(config.dim, config.norm_eps)
        self.join = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = Block(config, feed_forward)
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, token: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Join the stream with the next tokens and apply a block.

        Args:
            x: the stream after the last block or the previous module, [batch, seq, dim].
            token: embeddings of the tokens that `x` predicts, [batch, seq, dim].

        Returns:
            The stream for the next module, and its norm for the output projection.
        """
        x = self.join(torch.cat((self.stream_norm(x), self.token_norm(token)), -1))  # [batch, seq, 2 dim] -> [.., dim]
        x = self.block(x, rope)
        return x, self.norm(x)


def join_plan(sequence_parallel: bool) -> TensorPlan:
    """Return the tensor-parallel styles of a `PredictionBlock` outside its block."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    stream = stream_placement(sequence_parallel)
    plan: TensorPlan = {"join": ColwiseParallel(input_layouts=stream, output_layouts=stream)}
    return plan | norm_plan(("stream_norm", "token_norm", "norm"), sequence_parallel)


def further(targets: Tensor, ahead: int) -> Tensor:
    """
    Shift targets by `ahead` tokens. At the end of a sequence, where they are unknown, they are IGNORED.

    The length stays the same, because under sequence parallelism a rank holds a shard of every sequence.
    """
    known = torch.arange(targets.shape[1], device=targets.device) < targets.shape[1] - ahead
    return torch.where(known, targets.roll(-ahead, 1), IGNORED)

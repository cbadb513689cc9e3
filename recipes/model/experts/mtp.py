"""Multi-token prediction: modules behind the last block, each for one token further on (DeepSeek-AI 2024, V3, section 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshrunner.recipes.model.tensor_plan import norm_plan, stream
from meshrunner.recipes.model.transformer import Block, RMSNorm

if TYPE_CHECKING:
    from meshrunner.recipes.model.shape import DecoderShape
    from meshrunner.recipes.model.tensor_plan import TensorPlan

IGNORED = -100
"""A target that torch's cross entropy leaves out."""


class PredictionBlock(nn.Module):
    """One token further than the module before it, or than the network: from the same stream and the token between."""

    def __init__(self, config: DecoderShape, feed_forward: nn.Module) -> None:
        super().__init__()
        self.stream_norm = RMSNorm(config.dim, config.norm_eps)
        self.token_norm = RMSNorm(config.dim, config.norm_eps)
        self.join = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = Block(config, feed_forward)
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, token: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: the stream behind the last block or the module before, [batch, seq, dim].
            token: embeddings of the tokens that were predicted from there, as x.

        Returns:
            The stream for the next module, and its norm, for the output projection.
        """
        x = self.join(torch.cat((self.stream_norm(x), self.token_norm(token)), -1))
        x = self.block(x, rope)
        return x, self.norm(x)


def join_plan(sequence_parallel: bool) -> TensorPlan:
    """How tensor parallelism splits what comes before a module's block."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    between = stream(sequence_parallel)
    plan: TensorPlan = {"join": ColwiseParallel(input_layouts=between, output_layouts=between)}
    return plan | norm_plan(("stream_norm", "token_norm", "norm"), sequence_parallel)


def further(targets: Tensor, ahead: int) -> Tensor:
    """
    The targets so many tokens further on; at the end of a sequence, where they are not known, they are IGNORED.

    Nothing is cut off: with sequence parallelism a rank has a part of every sequence.
    """
    known = torch.arange(targets.shape[1], device=targets.device) < targets.shape[1] - ahead
    return torch.where(known, targets.roll(-ahead, 1), IGNORED)

"""Llama with experts. The network is in `moe_transformer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.experts.section import Experts
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.option import whole

if TYPE_CHECKING:
    from meshrunner.recipes.model.experts.moe_transformer import MoETransformer


class MoE(Llama):
    """Llama with experts in all blocks after the first `dense_layers`: Mixtral, Llama 4, the feed-forward of DeepSeek-V3."""

    dense_layers: Annotated[int, whole(at_least=0)] = 0
    """Leading blocks with a dense feed-forward network, of width `ffn_dim`."""
    experts: Experts
    """The experts of the other blocks."""

    @model_validator(mode="after")
    def _has_experts(self) -> MoE:
        if self.dense_layers >= self.n_layers:
            raise PydanticCustomError(
                "experts",
                f"dense_layers({self.dense_layers}) leaves none of n_layers({self.n_layers}) for experts; use kind llama",
            )
        return self

    @property
    def first_blocks(self) -> int:
        return self.dense_layers

    def inactive_parameters(self) -> int:
        return (self.n_layers - self.dense_layers) * self.experts.inactive_parameters(self.dim)

    def tensor_problems(self, tensor: int) -> list[str]:
        found = [each for each in super().tensor_problems(tensor) if self.dense_layers or ".ffn_dim" not in each]
        return found + self.experts.tensor_problems(tensor)

    def expert_problems(self, expert: int) -> list[str]:
        return self.experts.expert_problems(expert)

    def alignment_problems(self, tensor: int, element_bytes: int) -> list[str]:
        return self.experts.alignment_problems(self.dim, tensor, element_bytes)

    def network(self, seq_len: int) -> MoETransformer:
        from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward
        from meshrunner.recipes.model.experts.moe_transformer import ExpertBlock, MoETransformer
        from meshrunner.recipes.model.transformer import Block, FeedForward

        blocks = [
            Block(self, FeedForward(self.dim, self.ffn_dim))
            if layer < self.dense_layers
            else ExpertBlock(self, ExpertFeedForward(self.dim, self.experts))
            for layer in range(self.n_layers)
        ]
        return MoETransformer(self, seq_len, blocks, self.experts)

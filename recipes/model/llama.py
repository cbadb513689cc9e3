"""Llama 2 and 3, and Llama with experts. The networks are in `transformer` and `experts.moe_transformer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.decoder import Decoder, Experts
from meshrunner.recipes.option import whole

if TYPE_CHECKING:
    from meshrunner.recipes.model.transformer import Transformer


class Llama(Decoder):
    """RMSNorm, rotary grouped-query attention and SwiGLU (Touvron et al. 2023; Llama team 2024)."""

    n_layers: Annotated[int, whole(at_most=2_000)]
    """Number of blocks."""
    head_dim: Annotated[int | None, whole(None, at_most=2**16)] = None
    """Width of one attention head; null: dim / n_heads."""

    def check_heads(self) -> None:
        if self.head_dim is None and self.dim % self.n_heads:
            raise PydanticCustomError("heads", f"dim({self.dim}) is not a multiple of n_heads({self.n_heads})")
        if self.head_width % 2 and self.rope_theta is not None:
            width = f"dim({self.dim}) / n_heads({self.n_heads}) =" if self.head_dim is None else "head_dim"
            raise PydanticCustomError("heads", f"{width} {self.head_width} is odd, but rotary embeddings rotate pairs")
        super().check_heads()

    def at_depth(self, blocks: int) -> Self:
        return self.model_copy(update={"n_layers": blocks})

    def split_keys(self) -> list[str]:
        return [*super().split_keys(), "ffn_dim"]

    def network(self, seq_len: int) -> Transformer:
        from meshrunner.recipes.model.transformer import Transformer

        return Transformer(self, seq_len)


class MoE(Llama):
    """Llama with experts in all but the first `dense_layers` blocks, as in Mixtral, Llama 4 and the FFN of DeepSeek-V3."""

    dense_layers: Annotated[int, whole(at_least=0)] = 0
    """Number of leading blocks with a dense feed-forward network of width `ffn_dim`."""
    experts: Experts
    """Settings of the experts in all but the first `dense_layers` blocks."""

    @model_validator(mode="after")
    def _has_experts(self) -> MoE:
        if self.dense_layers >= self.n_layers:
            raise PydanticCustomError(
                "experts",
                f"dense_layers({self.dense_layers}) must be below n_layers({self.n_layers}), otherwise no layer has "
                "experts; use kind=llama for a dense model",
            )
        return self

    @property
    def first_blocks(self) -> int:
        return self.dense_layers

    def split_keys(self) -> list[str]:
        return [key for key in super().split_keys() if self.dense_layers or key != "ffn_dim"]

    def network(self, seq_len: int) -> Transformer:
        from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward
        from meshrunner.recipes.model.experts.moe_transformer import ExpertBlock, MoETransformer
        from meshrunner.recipes.model.transformer import Block, FeedForward

        blocks = [
            Block(self, FeedForward(self.dim, self.ffn_dim))
            if layer < self.dense_layers
            else ExpertBlock(self, ExpertFeedForward(self.dim, self.experts))
            for layer in range(self.n_layers)
        ]
        return MoETransformer(self, seq_len, blocks)

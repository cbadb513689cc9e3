"""Llama 2 and 3: the network is in `transformer`, what it has in common with other decoders in `shape`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Self

from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.shape import DecoderShape
from meshrunner.recipes.option import whole

if TYPE_CHECKING:
    from meshrunner.recipes.model.transformer import Transformer


class Llama(DecoderShape):
    """RMSNorm, rotary grouped-query attention and SwiGLU (Touvron et al. 2023; Llama team 2024)."""

    n_layers: Annotated[int, whole(at_most=2_000)]
    """Number of blocks."""

    def at_depth(self, blocks: int) -> Self:
        return self.model_copy(update={"n_layers": blocks})

    def check_heads(self) -> None:
        if self.dim % self.n_heads:
            raise PydanticCustomError("heads", f"dim({self.dim}) is not a multiple of n_heads({self.n_heads})")
        super().check_heads()
        if self.head_dim % 2 and self.rope_theta is not None:
            raise PydanticCustomError(
                "heads",
                f"dim({self.dim}) / n_heads({self.n_heads}) = {self.head_dim} is odd, but rotary embeddings rotate pairs",
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def weights(self) -> Iterator[tuple[str, int]]:
        for layer in range(self.n_layers):
            yield f"layers.{layer}.attention_norm.weight", self.dim
            for name, size in self.attention_weights().items():
                yield f"layers.{layer}.attention.{name}", size
            yield f"layers.{layer}.ffn_norm.weight", self.dim
            for name, size in self.feed_forward_weights(layer).items():
                yield f"layers.{layer}.feed_forward.{name}", size
        yield "norm.weight", self.dim
        yield self.output_weight

    def feed_forward_weights(self, layer: int) -> dict[str, int]:
        """As `weights`, of one block's feed-forward network."""
        return {f"{name}.weight": self.dim * self.ffn_dim for name in ("w1", "w3", "w2")}

    def tensor_problems(self, tensor: int) -> list[str]:
        return super().tensor_problems(tensor) + self.indivisible(tensor, "ffn_dim")

    def network(self, seq_len: int) -> Transformer:
        from meshrunner.recipes.model.transformer import Transformer

        return Transformer(self, seq_len)

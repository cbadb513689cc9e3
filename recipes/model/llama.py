"""Llama 2 and 3. The network is in `transformer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.decoder import Decoder
from meshrunner.recipes.option import whole

if TYPE_CHECKING:
    from meshrunner.recipes.model.transformer import Transformer


class Llama(Decoder):
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

    def tensor_problems(self, tensor: int) -> list[str]:
        return super().tensor_problems(tensor) + self.indivisible(tensor, "ffn_dim")

    def network(self, seq_len: int) -> Transformer:
        from meshrunner.recipes.model.transformer import Transformer

        return Transformer(self, seq_len)

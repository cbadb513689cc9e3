"""The shape of a decoder and its arithmetic: parameters, FLOPs, tensor-parallel degrees. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.base import Flops, Model
from meshrunner.recipes.option import Count, Section, whole


class RopeScaling(Section):
    """Llama 3.1's scaling of the rotary wavelengths (Llama team 2024, "The Llama 3 Herd of Models", and its reference code)."""

    factor: float = Field(gt=0)
    """Ratio of the extended context length to `original_seq_len`."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_seq_len / low_freq_factor` are scaled by the full factor."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_seq_len / high_freq_factor` are unchanged; those in between are interpolated."""
    original_seq_len: Count = 8192
    """Sequence length of the original training."""

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise PydanticCustomError("rope_scaling", f"low_freq_factor({low}) must be below high_freq_factor({high})")
        return self


class DecoderShape(Model):
    """A decoder of RMSNorm, rotary grouped-query attention and SwiGLU (Touvron et al. 2023; Llama team 2024)."""

    dim: Annotated[int, whole(at_most=2**17)]
    """Width of the residual stream."""
    n_layers: Annotated[int, whole(at_most=2_000)]
    """Number of blocks."""
    n_heads: Count
    """Query heads; each is dim / n_heads wide."""
    n_kv_heads: Count
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    ffn_dim: Annotated[int, whole(at_most=2**20)]
    """Hidden width of the feed-forward network."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's long-context scaling; null: none."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding table as the output projection too."""

    @model_validator(mode="after")
    def _heads_divide(self) -> DecoderShape:
        for multiple, part in (("dim", "n_heads"), ("n_heads", "n_kv_heads")):
            a, b = getattr(self, multiple), getattr(self, part)
            if a % b:
                raise PydanticCustomError("heads", f"{multiple}({a}) is not a multiple of {part}({b})")
        if self.head_dim % 2:
            raise PydanticCustomError(
                "heads",
                f"dim({self.dim}) / n_heads({self.n_heads}) = {self.head_dim} is odd, but rotary embeddings rotate pairs",
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads

    def parameter_count(self) -> int:
        """Number of parameters, trained and frozen; a tied table counts once."""
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return sum(size for _, size in self.weights()) + looked_up + self.inactive_parameters()

    def flops_per_token(self, seq_len: int) -> Flops:
        """
        6 x parameters + 12 x layers x heads x head_dim x sequence length (Chowdhery et al. 2022, PaLM, appendix B).

        Of the 6, a weight takes 2 forward, 2 for the gradient of its input and 2 for its own (Kaplan et al. 2020, section
        2.1). A frozen weight has no gradient of its own, and below the first trained one nothing goes backward at all.

        The embedding table does not count, because it is looked up, not multiplied; a tied table counts as the output
        projection. The attention term counts the full score matrix, ignoring causality, as torchtitan does.
        """
        total, attention, below = 0, 0, not self.is_frozen("tok_embeddings.weight")
        for name, size in self.weights():
            trained = not self.is_frozen(name)
            total += size * (2 + 2 * below + 2 * trained)
            below = below or trained
            if name.endswith("wv.weight"):
                attention += 4 * self.n_heads * self.head_dim * seq_len * (3 if below else 1)
        return Flops(total + attention, attention)

    def weights(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of the weights that a token is multiplied by, in the order of the forward pass."""
        kv_dim = self.n_kv_heads * self.head_dim
        block = {"attention_norm": self.dim, "attention.wq": self.dim**2, "attention.wk": self.dim * kv_dim}
        block |= {"attention.wv": self.dim * kv_dim, "attention.wo": self.dim**2, "ffn_norm": self.dim}
        for layer in range(self.n_layers):
            for name, size in block.items():
                yield f"layers.{layer}.{name}.weight", size
            for name, size in self.feed_forward_weights(layer).items():
                yield f"layers.{layer}.feed_forward.{name}", size
        yield "norm.weight", self.dim
        yield f"{'tok_embeddings' if self.tie_embeddings else 'output'}.weight", self.vocab_size * self.dim

    def feed_forward_weights(self, layer: int) -> dict[str, int]:
        """As `weights`, of one block's feed-forward network."""
        return {f"{name}.weight": self.dim * self.ffn_dim for name in ("w1", "w3", "w2")}

    def tensor_problems(self, tensor: int) -> list[str]:
        return [
            f"parallelism.tensor({tensor}) does not divide model.{name}({getattr(self, name)})"
            for name in ("n_heads", "n_kv_heads", "ffn_dim")
            if getattr(self, name) % tensor
        ]

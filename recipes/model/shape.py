"""The shape of a decoder and its arithmetic: parameters, FLOPs, tensor-parallel degrees. Needs no torch."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.base import Flops, Model
from meshrunner.recipes.option import Count, Section


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

    dim: Count
    """Width of the residual stream."""
    n_layers: Count
    """Number of blocks."""
    n_heads: Count
    """Query heads; each is dim / n_heads wide."""
    n_kv_heads: Count
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    ffn_dim: Count
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
        for whole, part in (("dim", "n_heads"), ("n_heads", "n_kv_heads")):
            a, b = getattr(self, whole), getattr(self, part)
            if a % b:
                raise PydanticCustomError("heads", f"{whole}({a}) is not a multiple of {part}({b})")
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
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.n_kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        return self.n_layers * block + tables + self.dim

    def flops_per_token(self, seq_len: int) -> Flops:
        """
        6 x parameters + 12 x layers x heads x head_dim x sequence length (Chowdhery et al. 2022, PaLM, appendix B).

        The embedding table does not count, because it is looked up, not multiplied; a tied table counts as the output
        projection. The attention term counts the full score matrix, ignoring causality, as torchtitan does.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        attention = 12 * self.n_layers * self.n_heads * self.head_dim * seq_len
        return Flops(6 * (self.parameter_count() - looked_up) + attention, attention)

    def tensor_problems(self, tensor: int) -> list[str]:
        return [
            f"parallelism.tensor({tensor}) does not divide model.{name}({getattr(self, name)})"
            for name in ("n_heads", "n_kv_heads", "ffn_dim")
            if getattr(self, name) % tensor
        ]

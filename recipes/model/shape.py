"""The shape of a decoder and its arithmetic: parameters, FLOPs, tensor-parallel degrees. Needs no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated

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
    """What decoders with grouped-query attention have in common."""

    if TYPE_CHECKING:  # keys of some kinds, follow from other keys in others

        @property
        def n_layers(self) -> int:
            """Number of blocks."""

        @property
        def head_dim(self) -> int:
            """Width of one head."""

    dim: Annotated[int, whole(at_most=2**17)]
    """Width of the residual stream."""
    n_heads: Count
    """Query heads."""
    n_kv_heads: Count
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    ffn_dim: Annotated[int, whole(at_most=2**20)]
    """Hidden width of the feed-forward network."""
    rope_theta: float | None = Field(default=10000.0, gt=0)
    """Base of the rotary wavelengths; null: no positions."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's long-context scaling; null: none."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding table as output projection."""

    @model_validator(mode="after")
    def _heads_fit(self) -> DecoderShape:
        self.check_heads()
        return self

    def check_heads(self) -> None:
        """Raise PydanticCustomError for heads that cannot be."""
        if self.n_heads % self.n_kv_heads:
            raise PydanticCustomError(
                "heads", f"n_heads({self.n_heads}) is not a multiple of n_kv_heads({self.n_kv_heads})"
            )
        if self.rope_theta is None and self.rope_scaling is not None:
            raise PydanticCustomError(
                "rope_scaling", "there is nothing to scale without rope_theta; use rope_scaling=null"
            )

    def parameter_count(self) -> int:
        """Number of parameters, trained and frozen; a tied table counts once."""
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return sum(dict(self.weights()).values()) + looked_up + self.inactive_parameters()

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
            passes = 3 if below else 1
            total += self.other_flops(name) * passes
            if name.endswith("attention.wv.weight"):
                attention += 4 * self.n_heads * self.head_dim * seq_len * passes
        return Flops(total + attention, attention)

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, int]]:
        """
        Names and sizes of the weights that a token is multiplied by, in the order of the forward pass; those that it is
        multiplied by several times are there as often.
        """

    def other_flops(self, name: str) -> int:
        """FLOPs of a forward pass for a token, where a weight is used, that are neither its product nor attention's scores."""
        return 0

    def attention_weights(self) -> dict[str, int]:
        """As `weights`, of one attention."""
        queries, keys = self.dim * self.n_heads * self.head_dim, self.dim * self.n_kv_heads * self.head_dim
        return {"wq.weight": queries, "wk.weight": keys, "wv.weight": keys, "wo.weight": queries}

    @property
    def output_weight(self) -> tuple[str, int]:
        """Name and size of the output projection's weight."""
        return f"{'tok_embeddings' if self.tie_embeddings else 'output'}.weight", self.vocab_size * self.dim

    def tensor_problems(self, tensor: int) -> list[str]:
        return self.indivisible(tensor, "n_heads", "n_kv_heads")

    def indivisible(self, tensor: int, *names: str) -> list[str]:
        """A sentence for each key that `tensor` devices cannot share."""
        return [
            f"parallelism.tensor({tensor}) does not divide model.{name}({value})"
            for name in names
            if (value := attrgetter(name)(self)) % tensor
        ]

"""The base class of decoders with grouped-query attention: keys, checks, parameter counts and FLOP counts."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.base import Flops, Model
from meshrunner.recipes.option import Count, Section, whole


class RopeScaling(Section):
    """Llama 3.1's scaling of the rotary wavelengths (Llama team 2024, "The Llama 3 Herd of Models", and its reference code)."""

    factor: float = Field(gt=0)
    """Ratio of the extended context length to `original_seq_len`."""
    low_freq_factor: float = 1.0
    """Wavelengths longer than `original_seq_len / low_freq_factor` are multiplied by `factor`."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_seq_len / high_freq_factor` are unchanged; those between the two limits are interpolated."""
    original_seq_len: Count = 8192
    """Sequence length in training before the extension."""

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise PydanticCustomError("rope_scaling", f"low_freq_factor({low}) must be below high_freq_factor({high})")
        return self


class Experts(Section):
    """The experts that replace the feed-forward network of a block (Shazeer et al. 2017; DeepSeek-AI 2024, V3)."""

    number: Annotated[int, whole(at_most=2**14)]
    """Experts per block."""
    per_token: Count
    """Number of experts to which each token is routed."""
    ffn_dim: Annotated[int, whole(at_most=2**20)]
    """Hidden width of one expert."""
    shared_ffn_dim: Annotated[int, whole(at_least=0, at_most=2**20)] = 0
    """Hidden width of the shared expert that every token passes through; 0: no shared expert."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function that turns the router's logits into scores: a sigmoid of each logit, or a softmax over all experts."""
    normalize: bool = True
    """Whether to divide the weights of a token's experts by the sum of these weights, so that they add up to 1."""
    routing: Literal["router", "balanced"] = "router"
    """Choice of each token's experts. router: experts with the best scores; balanced: all experts in turn, for timing."""
    route_scale: float = Field(default=1.0, gt=0)
    """Factor by which the weights of a token's experts are multiplied."""
    balance: Literal["bias", "sequence_loss", "none"] = "bias"
    """Method that balances the load of experts.

    bias: add a bias to the scores when choosing experts. After each step, the bias rises for experts that had too few tokens and
    falls for experts that had too many (Wang et al. 2024). sequence_loss: add an auxiliary loss, computed per sequence, to the
    training objective (DeepSeek-AI 2024, V3). `train/loss` excludes the auxiliary loss. none: no balancing.
    """
    balance_rate: float = Field(default=1e-3, gt=0)
    """Change of a bias per step if balance=bias; weight of the auxiliary loss if balance=sequence_loss."""

    @model_validator(mode="after")
    def _routable(self) -> Experts:
        if self.per_token > self.number:
            raise PydanticCustomError("experts", f"per_token({self.per_token}) is more than number({self.number})")
        if self.normalize and self.per_token == 1:
            raise PydanticCustomError(
                "experts",
                "with per_token=1, normalize=true divides the only weight by itself, so the router would never learn; "
                "use normalize=false",
            )
        return self


class Decoder(Model):
    """A decoder with RMSNorm and rotary grouped-query attention."""

    if TYPE_CHECKING:  # some subclasses declare these as keys, others derive them from keys

        @property
        def n_layers(self) -> int: ...

        @property
        def head_dim(self) -> int | None: ...

    dim: Annotated[int, whole(at_most=2**17)]
    """Width of the residual stream."""
    n_heads: Count
    """Number of query heads."""
    n_kv_heads: Count
    """Number of key heads, and also of value heads. n_heads / n_kv_heads query heads share one key head and one value head."""
    ffn_dim: Annotated[int, whole(at_most=2**20)]
    """Hidden width of the feed-forward network."""
    rope_theta: float | None = Field(default=10000.0, gt=0)
    """Base of the rotary wavelengths; null: no position encoding."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's scaling for long contexts; null: no scaling."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Number added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether to use the embedding table as output projection."""
    qkv_bias: bool = False
    """Whether to add a bias to queries, keys and values, as in Qwen2."""
    qk_norm: bool = False
    """Whether to apply RMSNorm to each query head and key head before they are rotated, as in Qwen3."""

    @property
    def ties_embeddings(self) -> bool:
        return self.tie_embeddings

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.dim // self.n_heads

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check_heads()
        return self

    def check_heads(self) -> None:
        """Raise PydanticCustomError if the settings of query heads, key heads and rotary embeddings are inconsistent."""
        if self.n_heads % self.n_kv_heads:
            raise PydanticCustomError(
                "heads", f"n_heads({self.n_heads}) is not a multiple of n_kv_heads({self.n_kv_heads})"
            )
        if self.rope_theta is None and self.rope_scaling is not None:
            raise PydanticCustomError(
                "rope_scaling", "rope_scaling has no effect without rope_theta; use rope_scaling=null"
            )

    def multiplied_weights(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each weight, and how many of its elements a token uses. A weight used twice is yielded twice."""
        network = self.on_meta(seq_len=1)
        names = {parameter: name for name, parameter in network.named_parameters()}
        for module in network.multiplied_modules():
            for parameter in module.parameters():
                yield names[parameter], network.active_elements(names[parameter])

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return 6 x parameters + 12 x layers x heads x head_dim x sequence length (Chowdhery et al. 2022, PaLM, appendix B).

        The 6 FLOPs of a weight are 2 in forward, 2 for the gradient of the input and 2 for the weight's gradient (Kaplan et al.
        2020, section 2.1). A frozen weight needs no gradient. Backward does not reach weights before the first trained weight.

        The embedding table is looked up, not multiplied, so it counts only if it is also the output projection. The
        attention term counts the full score matrix, ignoring causality, as torchtitan does. Each weight named
        `attention.wv` adds one attention term, so subclasses with other weight names must override this method.
        """
        each = [flops for _, flops in self._weight_flops(seq_len)]
        return Flops(sum(flops.total for flops in each), sum(flops.attention for flops in each))

    def _weight_flops(self, seq_len: int) -> Iterator[tuple[str, Flops]]:
        """Yield the name and the FLOPs of each weight. A weight used twice is yielded twice."""
        goes_backward = not self.is_frozen("tok_embeddings.weight")
        for name, size in self.multiplied_weights():
            trained = not self.is_frozen(name)
            total = size * (2 + 2 * goes_backward + 2 * trained)
            goes_backward = goes_backward or trained
            passes = 3 if goes_backward else 1
            attends = name.endswith("attention.wv.weight")
            attention = 4 * self.n_heads * self.head_width * seq_len * passes * attends
            yield name, Flops(total + self.other_flops(name) * passes + attention, attention)

    @property
    def pipeline_blocks(self) -> int:
        return self.n_layers

    def block_flops(self, seq_len: int) -> list[int]:
        found = [0] * (self.n_layers + 1)
        for name, flops in self._weight_flops(seq_len):
            stack, _, rest = name.partition(".")
            found[int(rest.partition(".")[0]) if stack == "layers" else -1] += flops.total
        return found

    def document_problems(self) -> list[str]:
        return []

    def pipeline_problems(self) -> list[str]:
        if self.routed is None or self.routed.balance != "sequence_loss":
            return []
        return [
            "model.experts.balance: sequence_loss is computed from the experts of all blocks, but parallelism.pipeline puts the "
            "blocks on several devices; use bias or none, or parallelism.pipeline=1"
        ]

    def other_flops(self, name: str) -> int:
        """Return forward FLOPs per token to count for a weight, besides matmuls and attention, such as Mamba-2's recurrence."""
        return 0

    @property
    def routed(self) -> Experts | None:
        """Settings of the experts, or None if the model has no experts."""
        return getattr(self, "experts", None)

    def inactive_parameters(self) -> int:
        if self.routed is None:
            return 0
        network = self.on_meta(seq_len=1)
        return sum(p.numel() - network.active_elements(name) for name, p in network.named_parameters())

    def split_keys(self) -> list[str]:
        """Return the keys, such as `n_heads`, whose values `parallelism.tensor` must divide, except keys in section `experts`."""
        return ["n_heads", "n_kv_heads"]

    def tensor_problems(self, tensor: int) -> list[str]:
        keys = self.split_keys() + (["experts.ffn_dim", "experts.shared_ffn_dim"] if self.routed else [])
        return [
            f"parallelism.tensor({tensor}) does not divide model.{key}({size})"
            for key in keys
            if (size := attrgetter(key)(self)) % tensor
        ]

    def expert_problems(self, expert: int) -> list[str]:
        if self.routed is None:
            return super().expert_problems(expert)
        if not self.routed.number % expert:
            return []
        return [f"parallelism.expert({expert}) does not divide model.experts.number({self.routed.number})"]

    def context_problems(self, context: int, tensor: int, method: str) -> list[str]:
        found = []
        if self.routed is not None and self.routed.balance == "sequence_loss":
            found.append(
                "model.experts.balance: sequence_loss needs all tokens of a sequence, but parallelism.context splits sequences; "
                "use bias or none, or parallelism.context=1"
            )
        heads, key_heads = self.n_heads // tensor, max(1, self.n_kv_heads // tensor)
        if method == "ulysses" and (heads % context or (key_heads % context and context % key_heads)):
            found.append(
                f"parallelism.context_method: ulysses cannot divide a device's {heads} query heads and {key_heads} key "
                f"heads among {context} devices; use allgather, or another parallelism.context"
            )
        return found

    def alignment_problems(self, tensor: int, element_bytes: int) -> list[str]:
        if self.routed is None:
            return []
        alignment = 16  # bytes; torch.nn.functional.grouped_mm requires the size of every row to be a multiple of this
        split = f" / parallelism.tensor({tensor})" if tensor > 1 else ""
        row_bytes = {
            f"model.dim({self.dim})": self.dim * element_bytes,
            f"model.experts.ffn_dim({self.routed.ffn_dim}){split}": self.routed.ffn_dim // tensor * element_bytes,
        }
        return [
            f"{name} x {element_bytes} bytes = {size} is not a multiple of {alignment}, which grouped matmuls require"
            for name, size in row_bytes.items()
            if size % alignment
        ]

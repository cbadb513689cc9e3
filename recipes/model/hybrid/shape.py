"""The shape of models whose blocks are of several kinds, given as a string of letters, and its arithmetic. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.experts.shape import Experts
from meshrunner.recipes.model.shape import DecoderShape
from meshrunner.recipes.option import Count, Section, whole

LETTERS = {"M": "Mamba-2", "*": "attention", "-": "feed-forward", "E": "experts"}


class Mamba(Section):
    """Mamba-2 (Dao and Gu 2024)."""

    heads: Count
    """Heads, each with a state of its own."""
    head_dim: Count
    """Width of one head."""
    groups: Count
    """Groups of heads that have B and C in common."""
    state: Count
    """Width of a state, for each of the head_dim channels."""
    conv: Annotated[int, whole(at_most=2**10)] = 4
    """Tokens that a convolution sees."""
    chunk: Annotated[int, whole(at_most=2**16)] = 128
    """Tokens that are multiplied with each other at once; the result does not depend on it."""
    kernel: Literal["auto", "torch", "fused"] = "auto"
    """fused: that of package mamba_ssm, on CUDA; torch: products in plain torch; auto: fused where there is one."""

    @model_validator(mode="after")
    def _groups_divide(self) -> Mamba:
        if self.heads % self.groups:
            raise PydanticCustomError("heads", f"heads({self.heads}) is not a multiple of groups({self.groups})")
        return self

    @property
    def inner(self) -> int:
        """Width between the projections."""
        return self.heads * self.head_dim

    def unsupported(self, device_type: str) -> str | None:
        """As `Model.unsupported`."""
        if self.kernel != "fused" or (missing := _missing_for_fused(device_type)) is None:
            return None
        return f"model.mamba.kernel: fused needs {missing}; use model.mamba.kernel=torch"

    def on(self, device_type: str) -> Self:
        """As `Model.on`."""
        if self.kernel != "auto":
            return self
        return self.model_copy(update={"kernel": "torch" if _missing_for_fused(device_type) else "fused"})

    def weights(self, dim: int) -> dict[str, int]:
        """Names and sizes of the parameters of one block's mixer."""
        inner, state = self.inner, self.groups * self.state
        found = {"wz.weight": dim * inner, "wx.weight": dim * inner, "wb.weight": dim * state, "wc.weight": dim * state}
        found["wdt.weight"] = dim * self.heads
        for name, channels in (("x", inner), ("b", state), ("c", state)):
            found |= {f"scan.conv_{name}.weight": channels * self.conv, f"scan.conv_{name}.bias": channels}
        found |= {f"scan.{name}": self.heads for name in ("a_log", "dt_bias", "d")}
        return found | {"scan.norm": inner, "wo.weight": inner * dim}

    @property
    def scan_flops(self) -> int:
        """FLOPs of the recurrence for a token in forward, as Megatron-LM counts them; a few percent of a block's."""
        return 7 * self.inner * self.state


def _missing_for_fused(device_type: str) -> str | None:
    """What the fused kernel lacks on `cpu` or `cuda` devices."""
    if device_type != "cuda":
        return "a GPU"
    return None if find_spec("mamba_ssm") is not None else "package mamba_ssm (pip install mamba-ssm)"


class MultiToken(Section):
    """Prediction of further tokens by modules behind the last block (DeepSeek-AI 2024, V3, section 2.2)."""

    depth: Annotated[int, whole(at_least=0, at_most=64)] = 0
    """Further tokens that are predicted, each by a module of attention and a feed-forward network."""
    loss_weight: float = Field(default=0.3, gt=0)
    """Weight of their mean loss, `train/mtp_loss`, in what is differentiated; `train/loss` is without it."""


class HybridShape(DecoderShape):
    """A decoder with one mixer or network a block."""

    pattern: Annotated[str, Field(min_length=1, max_length=2_000)]
    """A letter a block, each with a norm and a residual: M Mamba-2, * attention, - feed-forward, E experts."""
    head_dim: Count
    """Width of one head of attention."""
    ffn: Literal["swiglu", "relu2"] = "swiglu"
    """Of feed-forward networks: SwiGLU, or a squared ReLU between two products (So et al. 2021). Experts are SwiGLU."""
    mamba: Mamba | None = None
    """Of the M of the pattern; null: there are none."""
    experts: Experts | None = None
    """Of the E of the pattern; null: there are none."""
    mtp: MultiToken = MultiToken()
    """Multi-token prediction."""

    @field_validator("pattern")
    @classmethod
    def _of_letters(cls, pattern: str) -> str:
        if unknown := sorted(set(pattern) - set(LETTERS)):
            known = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
            raise PydanticCustomError("pattern", f"unknown {', '.join(map(repr, unknown))}; the letters are {known}")
        return pattern

    @model_validator(mode="after")
    def _sections_have_letters(self) -> HybridShape:
        for letter, name in (("M", "mamba"), ("E", "experts")):
            is_given, is_used = getattr(self, name) is not None, letter in self.pattern
            if is_used and not is_given:
                raise PydanticCustomError("pattern", f"'{letter}' in pattern '{self.pattern}' needs the section {name}")
            if is_given and not is_used:
                raise PydanticCustomError(
                    "pattern",
                    f"the section {name} is of no use without '{letter}' in pattern '{self.pattern}'; use {name}=null",
                )
        return self

    def unsupported(self, device_type: str) -> str | None:
        return None if self.mamba is None else self.mamba.unsupported(device_type)

    def on(self, device_type: str) -> Self:
        return self if self.mamba is None else self.model_copy(update={"mamba": self.mamba.on(device_type)})

    def resolved(self) -> dict[str, Any]:
        return {} if self.mamba is None else {"mamba.kernel": self.mamba.kernel}

    def check_heads(self) -> None:
        super().check_heads()
        if self.head_dim % 2 and self.rope_theta is not None:
            raise PydanticCustomError("heads", f"head_dim({self.head_dim}) is odd, but rotary embeddings rotate pairs")

    @property
    def n_layers(self) -> int:
        return len(self.pattern)

    def first(self, blocks: int) -> Self | None:
        if self.mtp.depth:  # its modules count as blocks, too
            return None
        pattern = self.pattern[:blocks]
        sections = {
            "mamba": self.mamba if "M" in pattern else None,
            "experts": self.experts if "E" in pattern else None,
        }
        return self.model_copy(update={"pattern": pattern, **sections})

    def weights(self) -> Iterator[tuple[str, int]]:
        for layer, letter in enumerate(self.pattern):
            yield f"layers.{layer}.norm.weight", self.dim
            for name, size in self._block_weights(letter):
                yield f"layers.{layer}.{name}", size
        yield "norm.weight", self.dim
        yield self.output_weight
        for ahead in range(self.mtp.depth):
            for norm in ("stream_norm", "token_norm"):
                yield f"mtp.{ahead}.{norm}.weight", self.dim
            yield f"mtp.{ahead}.join.weight", 2 * self.dim**2
            for letter, norm in (("*", "attention_norm"), ("-", "ffn_norm")):
                yield f"mtp.{ahead}.block.{norm}.weight", self.dim
                for name, size in self._block_weights(letter):
                    yield f"mtp.{ahead}.block.{name}", size
            yield f"mtp.{ahead}.norm.weight", self.dim
            yield self.output_weight

    def _block_weights(self, letter: str) -> Iterator[tuple[str, int]]:
        """As `weights`, of a block without its norm."""
        if letter == "M" and self.mamba is not None:
            part, sizes = "mamba", self.mamba.weights(self.dim)
        elif letter == "E" and self.experts is not None:
            part, sizes = "feed_forward", self.experts.active_weights(self.dim)
        elif letter == "*":
            part, sizes = "attention", self.attention_weights()
        else:
            names = ("w1", "w3", "w2") if self.ffn == "swiglu" else ("w1", "w2")
            part, sizes = "feed_forward", {f"{name}.weight": self.dim * self.ffn_dim for name in names}
        for name, size in sizes.items():
            yield f"{part}.{name}", size

    def other_flops(self, name: str) -> int:
        return self.mamba.scan_flops if self.mamba is not None and name.endswith("mamba.scan.a_log") else 0

    def inactive_parameters(self) -> int:
        return 0 if self.experts is None else self.pattern.count("E") * self.experts.inactive_parameters(self.dim)

    def tensor_problems(self, tensor: int) -> list[str]:
        predicts = self.mtp.depth > 0
        found = super().tensor_problems(tensor) if predicts or "*" in self.pattern else []
        if predicts or "-" in self.pattern:
            found += self.indivisible(tensor, "ffn_dim")
        if predicts:
            found += self.indivisible(tensor, "dim")
        if self.mamba is not None:
            found += self.indivisible(tensor, "mamba.heads", "mamba.groups")
        return found + (self.experts.tensor_problems(tensor) if self.experts is not None else [])

    def expert_problems(self, expert: int) -> list[str]:
        return super().expert_problems(expert) if self.experts is None else self.experts.expert_problems(expert)

    def alignment_problems(self, tensor: int, element_bytes: int) -> list[str]:
        return [] if self.experts is None else self.experts.alignment_problems(self.dim, tensor, element_bytes)

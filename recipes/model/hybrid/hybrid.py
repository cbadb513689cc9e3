"""Configuration of hybrid decoders. Each letter of the key `pattern` names the kind of one block."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.decoder import Decoder, Experts
from meshrunner.recipes.option import Count, Section, whole

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network

LETTERS = {"M": "Mamba-2", "*": "attention", "-": "feed-forward", "E": "experts"}
SECTIONS = {"M": "mamba", "E": "experts"}  # key of the section that configures the blocks of each letter


class MambaConfig(Section):
    """Settings of Mamba-2 (Dao and Gu 2024)."""

    heads: Count
    """Number of heads. Each head has a separate state."""
    head_dim: Count
    """Width of one head."""
    groups: Count
    """Number of groups. The heads of a group share the vectors B (writes to the state) and C (reads from the state)."""
    state: Count
    """Number of state elements per channel. A head has head_dim channels."""
    conv: Annotated[int, whole(at_most=32)] = 4
    """Width of the convolutions in tokens."""
    chunk: Annotated[int, whole(at_most=2**16)] = 128
    """Number of consecutive tokens that are processed together in matmuls. `chunk` affects speed and memory, not results."""
    kernel: Literal["auto", "torch", "fused"] = "auto"
    """fused: the CUDA kernels of packages mamba_ssm and, if installed, causal_conv1d; torch: matmuls in plain torch; auto: fused
    if available, else torch. mamba_ssm multiplies fp32 inputs in TF32, regardless of `precision.matmul`."""
    _chosen_on: str = PrivateAttr("")
    """Type of the devices for which `Hybrid.on` chose the kernel; "" if the configuration names the kernel."""

    @model_validator(mode="after")
    def _groups_divide(self) -> MambaConfig:
        if self.heads % self.groups:
            raise PydanticCustomError("heads", f"heads({self.heads}) is not a multiple of groups({self.groups})")
        return self

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def fuses_convolution(self) -> bool:
        """Whether the package causal_conv1d computes the convolutions."""
        return self.kernel == "fused" and find_spec("causal_conv1d") is not None


def _missing_for_fused(device_type: str) -> str | None:
    if device_type != "cuda":
        return "a GPU"
    return None if find_spec("mamba_ssm") is not None else "package mamba_ssm (pip install mamba-ssm)"


def only_atomic_sums() -> bool:
    """Whether the installed mamba_ssm is so old that it adds up gradients in random order."""
    found = find_spec("mamba_ssm")  # looking up a submodule would import the package
    folders = (found and found.submodule_search_locations) or ()
    return found is not None and not any(Path(each, "utils", "determinism.py").is_file() for each in folders)


class MultiToken(Section):
    """Multi-token prediction: modules after the last block predict further tokens (DeepSeek-AI 2024, V3, section 2.2)."""

    depth: Annotated[int, whole(at_least=0, at_most=64)] = 0
    """Number of tokens to predict after the next token. Each predicted token has a separate module (attention, feed-forward)."""
    loss_weight: float = Field(default=0.3, gt=0)
    """Weight of `train/mtp_loss` (mean loss of tokens after the next token) in the objective. `train/loss` excludes this loss."""


class Hybrid(Decoder):
    """A decoder with one layer per block: Mamba-2, attention, feed-forward or experts, as in Nemotron-H and Megatron-LM."""

    pattern: Annotated[str, Field(min_length=1, max_length=2_000)]
    """One letter per block: M Mamba-2, * attention, - feed-forward, E experts. Every block has a norm and a residual."""
    head_dim: Count
    """Width of one attention head."""
    ffn: Literal["swiglu", "relu2"] = "swiglu"
    """Feed-forward network. relu2: a squared ReLU between two linear layers (So et al. 2021). Experts always use swiglu."""
    mamba: MambaConfig | None = None
    """Settings of the Mamba-2 blocks; null if the pattern has no M."""
    experts: Experts | None = None
    """Settings of the blocks with experts; null if the pattern has no E."""
    mtp: MultiToken = MultiToken()
    """Multi-token prediction."""

    @property
    def tokens_ahead(self) -> int:
        return self.mtp.depth

    @field_validator("pattern")
    @classmethod
    def _of_letters(cls, pattern: str) -> str:
        if unknown := sorted(set(pattern) - set(LETTERS)):
            known = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
            raise PydanticCustomError(
                "pattern", f"no such letter: {', '.join(map(repr, unknown))}; the letters are {known}"
            )
        return pattern

    @model_validator(mode="after")
    def _is_consistent(self) -> Hybrid:
        for letter, name in SECTIONS.items():
            is_given, is_used = getattr(self, name) is not None, letter in self.pattern
            if is_used and not is_given:
                raise PydanticCustomError("pattern", f"'{letter}' in pattern '{self.pattern}' needs the section {name}")
            if is_given and not is_used:
                raise PydanticCustomError(
                    "pattern",
                    f"the section {name} has no effect without '{letter}' in pattern '{self.pattern}'; use {name}=null",
                )
        if self.head_dim % 2 and self.rope_theta is not None:
            raise PydanticCustomError("heads", f"head_dim({self.head_dim}) is odd, but rotary embeddings rotate pairs")
        return self

    def unsupported(self, device_type: str) -> str | None:
        if self.mamba is None or self.mamba.kernel != "fused" or not (missing := _missing_for_fused(device_type)):
            return None
        return f"model.mamba.kernel: fused needs {missing}; use model.mamba.kernel=torch"

    def on(self, device_type: str, *, deterministic: bool = False) -> Self:
        if self.mamba is None or self.mamba.kernel != "auto":
            return self
        missing = _missing_for_fused(device_type) or (deterministic and only_atomic_sums())
        mamba = self.mamba.model_copy(update={"kernel": "torch" if missing else "fused"})
        mamba._chosen_on = device_type
        return self.model_copy(update={"mamba": mamba})

    def remarks(self) -> list[str]:
        if self.mamba is None or self.mamba._chosen_on != "cuda" or self.mamba.kernel != "torch":
            return []
        why = _missing_for_fused("cuda") or "a newer mamba_ssm, with deterministic kernels"
        return [
            f"model.mamba.kernel: auto chose torch, because fused needs {why}. Without compile, kernel=torch keeps a "
            f"{self.mamba.chunk} x {self.mamba.chunk} matrix per head and chunk for backward. These matrices can "
            "take gigabytes per block"
        ]

    def import_kernels(self) -> None:
        if self.mamba is None or self.mamba.kernel != "fused":
            return
        convolutions = ["causal_conv1d.cpp_functions"] if self.mamba.fuses_convolution else []
        for module in ("mamba_ssm.ops.triton.ssd_combined", *convolutions):
            try:
                import_module(module)
            except Exception as error:  # a package that was built for another torch may raise anything
                raise ConfigError(
                    f"model.mamba.kernel: package {module.partition('.')[0]} is installed, but cannot be imported; repair or "
                    f"remove it, or use model.mamba.kernel=torch. {type(error).__name__}: {error}"
                ) from error

    def resolved(self) -> dict[str, Any]:
        return {} if self.mamba is None else {"mamba.kernel": self.mamba.kernel}

    @property
    def n_layers(self) -> int:
        return len(self.pattern)

    def first(self, blocks: int) -> Self | None:
        if self.mtp.depth:  # `block_names` includes the modules of multi-token prediction
            return None
        pattern = self.pattern[:blocks]
        unused = {name: None for letter, name in SECTIONS.items() if letter not in pattern}
        return self.model_copy(update={"pattern": pattern, **unused})

    def other_flops(self, name: str) -> int:
        """Return the FLOPs of Mamba-2's recurrence, a few percent of a block's FLOPs, counted as in Megatron-LM."""
        if self.mamba is None or not name.endswith("mamba.scan.a_log"):
            return 0
        return 7 * self.mamba.inner * self.mamba.state

    def document_problems(self) -> list[str]:
        state, ahead = "the state of Mamba-2 blocks", "multi-token prediction"
        crossing = [state] * (self.mamba is not None) + [ahead] * (self.mtp.depth > 0)
        return [f"data.documents: {each} crosses the ends of documents; use data.documents=joined" for each in crossing]

    def split_keys(self) -> list[str]:
        predicts = self.mtp.depth > 0
        keys = super().split_keys() if predicts or "*" in self.pattern else []
        if predicts or "-" in self.pattern:
            keys.append("ffn_dim")
        if predicts:
            keys.append("dim")
        return keys + (["mamba.heads", "mamba.groups"] if self.mamba is not None else [])

    def network(self, seq_len: int) -> Network:
        # Import by name, as `Option.resolve` does, because the network's module imports this module.
        return resolve_name("meshrunner.recipes.model.hybrid.hybrid_transformer:HybridTransformer")(self, seq_len)

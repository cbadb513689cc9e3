"""The section `experts` of a model and its arithmetic. Needs no torch, and knows no model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Count, Section, whole

ALIGNMENT = 16
"""Bytes: the rows of every matrix in a grouped product begin at a multiple of them (torch.nn.functional.grouped_mm)."""


class Experts(Section):
    """The experts of a block, in place of one feed-forward network (Shazeer et al. 2017; DeepSeek-AI 2024, V3)."""

    number: Annotated[int, whole(at_most=2**14)]
    """Experts of a block."""
    per_token: Count
    """Experts that each token is sent to."""
    ffn_dim: Annotated[int, whole(at_most=2**20)]
    """Hidden width of one expert."""
    shared_ffn_dim: Annotated[int, whole(at_least=0, at_most=2**20)] = 0
    """Hidden width of the expert that every token passes; 0: there is none."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """Of the router's output for a token: every expert by itself, or all of them together."""
    normalize: bool = True
    """Divide the weights of a token's experts by their sum."""
    route_scale: float = Field(default=1.0, gt=0)
    """Factor on the weights."""
    balance: Literal["bias", "sequence_loss", "none"] = "bias"
    """How experts are kept equally busy. bias: before the choice, what decides it is raised where an expert had too few tokens in
    the step before, and lowered where it had too many (Wang et al. 2024); sequence_loss: a loss over each sequence (DeepSeek-AI
    2024, V3), which is differentiated and not part of `train/loss`; none: they are not."""
    balance_rate: float = Field(default=1e-3, gt=0)
    """Step of the bias, or weight of the loss."""

    @model_validator(mode="after")
    def _routable(self) -> Experts:
        if self.per_token > self.number:
            raise PydanticCustomError("experts", f"per_token({self.per_token}) is more than number({self.number})")
        if self.normalize and self.per_token == 1:
            raise PydanticCustomError(
                "experts",
                "with per_token(1), normalize(true) divides the only weight by itself, and the router would never learn; "
                "use normalize=false",
            )
        return self

    def active_weights(self, dim: int) -> dict[str, int]:
        """Names and sizes of the weights that a token is multiplied by; of a stack of experts its own."""
        found = {"router.weight": dim * self.number}
        found |= {f"experts.{name}": self.per_token * dim * self.ffn_dim for name in ("w1", "w3", "w2")}
        if self.shared_ffn_dim:
            found |= {f"shared.{name}.weight": dim * self.shared_ffn_dim for name in ("w1", "w3", "w2")}
        return found

    def inactive_parameters(self, dim: int) -> int:
        """Number of parameters of the experts of a block that a token is not sent to."""
        return 3 * (self.number - self.per_token) * dim * self.ffn_dim

    def tensor_problems(self, tensor: int) -> list[str]:
        """As `Model.tensor_problems`: every expert's width is split."""
        return [
            f"parallelism.tensor({tensor}) does not divide model.experts.{name}({getattr(self, name)})"
            for name in ("ffn_dim", "shared_ffn_dim")
            if getattr(self, name) % tensor
        ]

    def expert_problems(self, expert: int) -> list[str]:
        """As `Model.expert_problems`."""
        if not self.number % expert:
            return []
        return [f"parallelism.expert({expert}) does not divide model.experts.number({self.number})"]

    def alignment_problems(self, dim: int, tensor: int, element_bytes: int) -> list[str]:
        """As `Model.alignment_problems`, for a residual stream of width `dim`."""
        widths = {f"model.dim({dim})": dim * element_bytes}
        split = f" / parallelism.tensor({tensor})" if tensor > 1 else ""
        widths[f"model.experts.ffn_dim({self.ffn_dim}){split}"] = self.ffn_dim // tensor * element_bytes
        return [
            f"{name} x {element_bytes} bytes = {size} is not a multiple of {ALIGNMENT}, which grouped matrix products need"
            for name, size in widths.items()
            if size % ALIGNMENT
        ]

"""The section `experts` of a model's configuration, its checks and its parameter count."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Count, Section, whole

ALIGNMENT = 16
"""Bytes that the size of a row must be a multiple of in a grouped matmul (torch.nn.functional.grouped_mm)."""


class Experts(Section):
    """The experts of a block, in place of one feed-forward network (Shazeer et al. 2017; DeepSeek-AI 2024, V3)."""

    number: Annotated[int, whole(at_most=2**14)]
    """Experts per block."""
    per_token: Count
    """Experts that each token is routed to."""
    ffn_dim: Annotated[int, whole(at_most=2**20)]
    """Hidden width of one expert."""
    shared_ffn_dim: Annotated[int, whole(at_least=0, at_most=2**20)] = 0
    """Hidden width of the shared expert that every token passes; 0: there is none."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """Scores from the router's logits: sigmoid of each expert's logit, or softmax over all experts."""
    normalize: bool = True
    """Divide the weights of a token's experts by their sum."""
    route_scale: float = Field(default=1.0, gt=0)
    """Factor on the weights."""
    balance: Literal["bias", "sequence_loss", "none"] = "bias"
    """
    Method that balances the load of experts.

    bias: a bias on the scores that choose experts rises for each expert with too few tokens in the last step, and falls for each
    with too many (Wang et al. 2024). sequence_loss: an auxiliary loss over each sequence (DeepSeek-AI 2024, V3), which is trained
    on but not part of `train/loss`. none: no balancing.
    """
    balance_rate: float = Field(default=1e-3, gt=0)
    """Step size of the bias, or weight of the loss."""

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

    def inactive_parameters(self, dim: int) -> int:
        """Return the number of parameters in the experts of a block that a token is not routed to."""
        return 3 * (self.number - self.per_token) * dim * self.ffn_dim

    def tensor_problems(self, tensor: int) -> list[str]:
        """Implement `Model.tensor_problems`: the width of every expert is split."""
        return [
            f"parallelism.tensor({tensor}) does not divide model.experts.{name}({getattr(self, name)})"
            for name in ("ffn_dim", "shared_ffn_dim")
            if getattr(self, name) % tensor
        ]

    def expert_problems(self, expert: int) -> list[str]:
        """Implement `Model.expert_problems`."""
        if not self.number % expert:
            return []
        return [f"parallelism.expert({expert}) does not divide model.experts.number({self.number})"]

    def alignment_problems(self, dim: int, tensor: int, element_bytes: int) -> list[str]:
        """Implement `Model.alignment_problems` for a residual stream of width `dim`."""
        split = f" / parallelism.tensor({tensor})" if tensor > 1 else ""
        row_bytes = {
            f"model.dim({dim})": dim * element_bytes,
            f"model.experts.ffn_dim({self.ffn_dim}){split}": self.ffn_dim // tensor * element_bytes,
        }
        return [
            f"{name} x {element_bytes} bytes = {size} is not a multiple of {ALIGNMENT}, which grouped matrix products need"
            for name, size in row_bytes.items()
            if size % ALIGNMENT
        ]

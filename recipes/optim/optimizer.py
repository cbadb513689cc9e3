"""The `optimizer` group, and an optimizer step that is skipped when the gradient is not finite."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Option):
    """An optimizer of a model's trainable parameters."""

    kinds: ClassVar[dict[str, str]] = {"adamw": "meshrunner.recipes.optim.optimizer:AdamW"}

    lr: float = Field(gt=0)
    """Base learning rate, before the schedule's factor."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can contain the update if the learning rate and the step count are tensors on the device."""
        return False

    def state_bytes(self, elements: int, tensors: int) -> int | None:
        """Return the bytes of optimizer state for `tensors` parameters with `elements` elements in total; None if unknown."""
        return None

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer for sharded, materialised parameters."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    betas: tuple[Beta, Beta] = Field(strict=False)
    """Decay rates of the running means of the gradient and the squared gradient."""
    eps: float = Field(gt=0)
    """Number added to the root of the running mean of the squared gradient."""
    weight_decay: float = Field(ge=0)
    """Decoupled weight decay, applied to every parameter."""
    implementation: Literal["fused", "foreach", "for_loop"]
    """fused: one kernel for all parameters; foreach: one kernel per operation; for_loop: one parameter at a time."""

    @property
    def capturable(self) -> bool:
        return self.implementation == "fused"

    def state_bytes(self, elements: int, tensors: int) -> int:
        """Return the bytes of two fp32 moments per element and one fp32 step count per parameter."""
        return 8 * elements + 4 * tensors

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        import torch

        return torch.optim.AdamW(
            [{"params": list(parameters)}],  # a stage may have no parameters, which torch accepts only in a group
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=self.implementation == "fused",
            foreach=self.implementation == "foreach",
        )


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
    """Take one optimizer step if the global gradient norm is finite. The host waits for the device unless `fused` is set."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if not parameters:  # nothing is trained in this pipeline stage
        return
    finite = grad_norm.isfinite().to(parameters[0].device)  # offloaded parameters are on the host
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~finite).to(grad_norm.dtype)  # type: ignore[attr-defined]
        optimizer.step()
    elif finite.is_meta or finite:
        optimizer.step()

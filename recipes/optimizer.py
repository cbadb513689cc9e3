"""The `optimizer` group, and the step that leaves everything as it is when the gradient is not finite."""

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
    """An optimizer over a model's trained parameters."""

    kinds: ClassVar[dict[str, str]] = {"adamw": "meshrunner.recipes.optimizer:AdamW"}

    lr: float = Field(gt=0)
    """Learning rate before the schedule's factor."""

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over parameters that are spread and materialised."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    betas: tuple[Beta, Beta] = Field(strict=False)
    """Decay of the running means of gradient and squared gradient."""
    eps: float = Field(gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(ge=0)
    """Decoupled weight decay, on every parameter."""
    implementation: Literal["fused", "foreach", "for_loop"]
    """fused: one kernel for all parameters; foreach: one kernel for each operation; for_loop: one for each parameter."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        import torch

        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=self.implementation == "fused",
            foreach=self.implementation == "foreach",
        )


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
    """
    One optimizer step, without effect when the global gradient norm is not finite: decided on the device.

    A fused kernel reads the flag itself. Without one, learning rate and weight decay cannot be masked on the device, so
    the host has to look: a synchronisation on an accelerator, none on a CPU.
    """
    finite = grad_norm.isfinite()
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~finite).to(grad_norm.dtype)  # type: ignore[attr-defined]
        optimizer.step()
    elif finite:
        optimizer.step()

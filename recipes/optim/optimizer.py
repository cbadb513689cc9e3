"""The `optimizer` group, and an optimizer step that is skipped when the gradient is not finite."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from meshrunner.recipes.model.base import matches
from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from meshrunner.recipes.optim.grad_norm import Trainable

Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Option):
    """An optimizer of a model's trainable parameters."""

    kinds: ClassVar[dict[str, str]] = {
        "adamw": "meshrunner.recipes.optim.optimizer:AdamW",
        "muon": "meshrunner.recipes.optim.optimizer:Muon",
    }

    gathers_matrices: ClassVar[bool] = False
    """Whether the update all-gathers matrices."""

    lr: float = Field(gt=0)
    """Base learning rate, before the schedule's factor."""
    no_decay: list[str] = []
    """Patterns of names, such as `*norm.weight`. Parameters that match a pattern get no weight decay."""
    skip_above: float | None = Field(None, gt=0)
    """Skip updates whose loss or gradient norm is this number of standard deviations above the mean of the last 128 updates."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can contain the update if the learning rate and the step count are tensors on the device."""
        return False

    def state_bytes(self, elements: int, tensors: int) -> int | None:
        """Return the bytes of optimizer state for `tensors` parameters with `elements` elements in total; None if unknown."""
        return None

    def build_for(self, trained: Sequence[Trainable]) -> torch.optim.Optimizer:
        """Build the optimizer for named parameters, without weight decay for those that `no_decay` matches."""
        optimizer = self.build([each.parameter for each in trained])
        undecayed = {each.parameter for each in trained if matches(self.no_decay, each.name)}
        regroup(optimizer, undecayed, weight_decay=0.0)
        return optimizer

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
    """Decoupled weight decay, applied to every parameter that `no_decay` does not match."""
    implementation: Literal["fused", "foreach", "for_loop"]
    """fused: one kernel for all parameters; foreach: one kernel per operation; for_loop: one parameter at a time."""

    @property
    def capturable(self) -> bool:
        return self.implementation == "fused"

    def state_bytes(self, elements: int, tensors: int) -> int | None:
        """Return the bytes of two fp32 moments per element and one fp32 step count per parameter."""
        return 8 * elements + 4 * tensors

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        return self._class()(
            [{"params": list(parameters)}],  # a stage may have no parameters; torch takes an empty list only in a group
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=self.implementation == "fused",
            foreach=self.implementation == "foreach",
        )

    def _class(self) -> type[torch.optim.AdamW]:
        import torch

        return torch.optim.AdamW


class Muon(AdamW):
    """Muon (Jordan et al. 2024) for the weights of linear layers in blocks and for each expert's matrices. The update is the
    orthogonalised momentum, scaled to suit AdamW's learning rate (Liu et al. 2025). AdamW updates all other parameters."""

    gathers_matrices: ClassVar[bool] = True
    capturable: ClassVar[bool] = False

    momentum: float = Field(ge=0, lt=1)
    """Decay rate of the running mean of a matrix's gradient."""
    iteration_dtype: Literal["bf16", "fp32"]
    """dtype in which matrices are gathered and orthogonalised. bf16: faster; fp32: layouts agree better."""

    def state_bytes(self, elements: int, tensors: int) -> int | None:
        return None  # the number of matrices is unknown

    def build_for(self, trained: Sequence[Trainable]) -> torch.optim.Optimizer:
        optimizer = super().build_for(trained)
        matrices = {each.parameter for each in trained if each.is_matrix}
        regroup(optimizer, matrices, momentum=self.momentum, iteration_dtype=self.iteration_dtype)
        return optimizer

    def _class(self) -> type[torch.optim.AdamW]:
        from meshrunner.recipes.optim.muon import MuonAdamW

        return MuonAdamW


def regroup(optimizer: torch.optim.Optimizer, chosen: Collection[nn.Parameter], **settings: Any) -> None:
    """Apply settings to the chosen parameters. If only a part of a group is chosen, move this part to a new group."""
    for group in list(optimizer.param_groups):
        moved = [each for each in group["params"] if each in chosen]
        kept = [each for each in group["params"] if each not in chosen]
        if moved and kept:
            group["params"] = kept
            optimizer.add_param_group({**group, **settings, "params": moved})
        elif moved:
            group.update(settings)


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

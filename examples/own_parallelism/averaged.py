"""A parallelism of your own: data parallelism without a wrapper, averaging each gradient as soon as backward computes it.

    meshrunner run --config-dir examples/own_parallelism parallelism=averaged steps=5

`parallelism/averaged.yaml` names this class by `kind: examples.own_parallelism.averaged:Averaged`; nothing has to be registered.
DDP adds two things: many gradients share one all-reduce (buckets), and all-reduces overlap with backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.base import Degrees, Parallelism

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan
    from meshrunner.recipes.precision.base import Precision


class Averaged(Parallelism):
    """Every device holds a replica, and each gradient is averaged by its own collective."""

    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype in which gradients are communicated; bf16 halves the traffic, but rounds gradients."""

    def degrees(self, nodes: int, workers: int) -> Degrees:
        """Make every device a replica. Raise ConfigError for degrees that cannot work, before anything starts."""
        if self.tensor > 1 or self.shard not in ("auto", 1):
            raise ConfigError("parallelism: averaged only has replicas; use parallelism.tensor=1 parallelism.shard=1")
        return Degrees(replicate=nodes * workers, shard=1, tensor=1)

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        """Initialise the replica, which is equal on every device, and register hooks that average its gradients."""
        if precision.param_dtype is not None:
            raise ConfigError("parallelism: averaged computes in the dtype of the parameters; use precision=fp32")
        initialiser.materialise(model)
        average = self._average(mesh.get_group("replicate"), model) if mesh.size() > 1 else None
        for parameter in model.parameters():
            if average is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)
        return model

    def _average(self, group: ProcessGroup, model: nn.Module) -> Callable[[Tensor], None]:
        import torch
        import torch.distributed as dist

        def average(parameter: Tensor) -> None:
            if getattr(model, "accumulates", False) or parameter.grad is None:
                return
            gradient = parameter.grad if self.reduce == "fp32" else parameter.grad.to(torch.bfloat16)
            dist.all_reduce(gradient, group=group)
            parameter.grad.copy_(gradient).div_(group.size())

        return average

    @contextmanager
    def accumulating(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Accumulate gradients locally in all micro batches of a step except the last. Each micro batch runs in this context."""
        model.accumulates = not last  # type: ignore[assignment]
        yield

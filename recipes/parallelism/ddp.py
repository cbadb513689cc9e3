"""DDP: every device has a full replica, and gradients are all-reduced in buckets during backward (Li et al. 2020)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.base import Degrees, Parallelism
from meshrunner.recipes.parallelism.mesh import replicas

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan
    from meshrunner.recipes.precision.base import Precision


class DDP(Parallelism):
    """A full replica of the model on every data-parallel device. With `shard: auto`, there are (devices / `tensor`) replicas."""

    autocasts: ClassVar[bool] = True

    bucket_cap_mb: float = Field(gt=0)
    """Maximum size of a gradient bucket in MiB. Each bucket is all-reduced separately."""

    def degrees(self, nodes: int, workers: int) -> Degrees:
        if self.shard not in ("auto", 1):
            raise ConfigError(
                f"parallelism.shard: ddp does not shard, but shard is {self.shard}; use shard=auto or parallelism=fsdp2"
            )
        return super().degrees(nodes, workers).unsharded()

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        initialiser.materialise(model)
        return DistributedDataParallel(
            model,
            process_group=mesh["replicate" if replicas(mesh) > 1 else "shard"].get_group(),
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
            init_sync=False,  # the replicas are equal by construction
            # If False, DDP rebuilds its buckets after the first step, so a resumed run may add up in another order.
            find_unused_parameters=torch.are_deterministic_algorithms_enabled(),
        )

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else model.no_sync()

"""DDP: a full replica on every device, gradients all-reduced in buckets during backward (Li et al. 2020)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.base import Degrees, Parallelism

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.parallelism.wrap_plan import WrapPlan
    from meshrunner.recipes.precision.base import Precision


class DDP(Parallelism):
    """Every data-parallel device holds a replica: the devices of `shard: auto` become replicas, too."""

    autocasts: ClassVar[bool] = True

    bucket_cap_mb: float = Field(gt=0)
    """MiB of gradients in one all-reduce."""

    def degrees(self, nodes: int, workers: int) -> Degrees:
        if self.shard not in ("auto", 1):
            raise ConfigError(
                f"parallelism.shard: ddp does not shard, but shard is {self.shard}; use shard=auto or parallelism=fsdp2"
            )
        found = super().degrees(nodes, workers)
        return Degrees(found.replicate * found.shard, 1, found.tensor)

    def apply(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        plan: WrapPlan,
        precision: Precision,
        initialiser: Initialiser,
        expert_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        initialiser.materialise(model)
        replicas = mesh["replicate"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh
        return DistributedDataParallel(
            model,
            process_group=replicas.get_group(),
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
            init_sync=False,  # the replicas are equal by construction
            # Without it buckets are put together anew after the first step, also the first after a resume, and more than two
            # devices then add up in another order.
            find_unused_parameters=torch.are_deterministic_algorithms_enabled(),
        )

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        from torch.nn.parallel import DistributedDataParallel

        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()

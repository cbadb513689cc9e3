"""FSDP2: each parameter is sharded individually (torch.distributed.fsdp.fully_shard; Zhao et al. 2023)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, ClassVar

from meshrunner.recipes.option import whole
from meshrunner.recipes.parallelism.base import Degrees, Held, Parallelism

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from meshrunner.recipes.init_weights import Initialiser
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision import Precision


class FSDP2(Parallelism):
    """Sharding over `shard` devices; with `replicate` above 1, that many sharded replicas (HSDP)."""

    wraps_units: ClassVar[bool] = True
    gathers_lookups_again: ClassVar[bool] = False

    prefetch: Annotated[int, whole(at_least=0)]
    """Units that are all-gathered ahead of the current one; 0: torch's default, which is one."""
    cpu_offload: bool
    """Keep sharded parameters, gradients and optimizer state in host memory; the optimizer runs on the CPU."""

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        names = mesh.mesh_dim_names or ()
        data_mesh = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        policy = MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            # Parameters determine the dtype of activations; inputs such as the rotary table stay fp32.
            cast_forward_inputs=False,
        )
        on_gpu = initialiser.device.type != "cpu"
        for name, unit in plan.items():
            module = model.get_submodule(name)
            fully_shard(
                module,
                mesh=data_mesh,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
                reshard_after_forward=unit.reshard_after_forward,
            )
            if unit.lookup:
                assert isinstance(module, FSDPModule)
                module.set_unshard_in_backward(False)  # its gradient follows from the tokens
        if self.prefetch:
            units: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
            _prefetch(units[1:], self.prefetch)
        initialiser.materialise(model, offload=self.cpu_offload)
        return model

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule)
        if self.accumulate == "hold":
            model.set_requires_gradient_sync(last)
        elif self.replicate > 1:
            model.set_requires_all_reduce(last)  # among replicas, whose shards of the gradients are added up until then
        return nullcontext()

    def held(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Held:
        """Every parameter is cut along its first dimension and padded to equal shards, and so is its gradient."""
        shards = [(-(-p.shape[0] // degrees.shard) * p.numel // p.shape[0], p.trained) for p in unit.parameters]
        trained = sum(numel for numel, is_trained in shards if is_trained)
        return Held(sum(numel for numel, _ in shards), trained, trained)

    def accumulated(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> int:
        return precision.reduce_bytes * unit.trained if degrees.shard > 1 else 0


def _prefetch(units: list[FSDPModule], depth: int) -> None:
    """All-gather `depth` units ahead, in forward and in backward. units: in forward order, without the root."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])

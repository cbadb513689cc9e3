"""FSDP2: every parameter sharded by itself (torch.distributed.fsdp.fully_shard; Zhao et al. 2023)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, ClassVar

from meshrunner.recipes.option import whole
from meshrunner.recipes.parallelism.base import Degrees, Parallelism, Traffic, sharded_traffic

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from meshrunner.recipes.init_weights import Initial
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision import Precision


class FSDP2(Parallelism):
    """Shard over `shard` devices; with `replicate` above 1 that many sharded copies (HSDP)."""

    wraps_units: ClassVar[bool] = True

    prefetch: Annotated[int, whole(at_least=0)]
    """Units that are gathered ahead of the one that runs; 0: as torch does it by itself, one ahead."""
    cpu_offload: bool
    """Keep sharded parameters, gradients and optimizer state in host memory; the optimizer then runs there."""

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initial: Initial
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
            # Parameters set the dtype of what flows through the model; inputs such as the rotary table stay fp32.
            cast_forward_inputs=False,
        )
        on_gpu = initial.device.type != "cpu"
        for name, unit in plan.items():
            fully_shard(
                model.get_submodule(name),
                mesh=data_mesh,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
                reshard_after_forward=unit.reshard_after_forward,
            )
        if self.prefetch:
            _prefetch(
                [module for _, module in model.named_modules() if isinstance(module, FSDPModule)][1:], self.prefetch
            )
        initial.materialise(model)
        return model

    def traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        return sharded_traffic(unit, precision, degrees, micro_batches)

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return nullcontext()


def _prefetch(units: list[FSDPModule], depth: int) -> None:
    """Gather `depth` units ahead, in forward and in backward. units: without the root, in the order of forward."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])

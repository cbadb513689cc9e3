"""FSDP1: each unit's parameters are flattened and sharded as one tensor (FullyShardedDataParallel; Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshrunner.recipes.parallelism.base import Degrees, Held, Parallelism

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.parallelism.base import Groups
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision.base import Precision


ALIGNMENT = 16
"""Bytes that FSDP1 aligns each parameter to in the flat one of its unit, in the dtype of compute."""


class FSDP1(Parallelism):
    """FSDP1 with the units and degrees of FSDP2: `always` is FULL_SHARD, `never` SHARD_GRAD_OP, `replicate` makes it hybrid."""

    wraps_units: ClassVar[bool] = True

    backward_prefetch: Literal["pre", "post", "none"]
    """Time to all-gather the next unit in backward: before the current unit's gradients are computed (more overlap, more
    memory), after that, or when it is needed."""
    forward_prefetch: bool
    """All-gather the next unit before the current unit's forward."""
    limit_all_gathers: bool
    """Limit the host to two gathered units ahead of the device."""

    def apply(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        plan: WrapPlan,
        precision: Precision,
        initialiser: Initialiser,
        expert_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import CustomPolicy

        hybrid = "replicate" in (mesh.mesh_dim_names or ())
        resharded = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        kept = ShardingStrategy._HYBRID_SHARD_ZERO2 if hybrid else ShardingStrategy.SHARD_GRAD_OP
        strategies: dict[nn.Module, dict[str, Any]] = {
            model.get_submodule(name): {"sharding_strategy": resharded if unit.reshard_after_forward else kept}
            for name, unit in plan.items()
            if name
        }
        prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh["replicate", "shard"] if hybrid else mesh["shard"],
            # FSDP1 keeps the root gathered between forward and backward under any strategy.
            sharding_strategy=resharded,
            auto_wrap_policy=CustomPolicy(lambda module: strategies.get(module, False)),
            mixed_precision=MixedPrecision(
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            backward_prefetch=prefetch[self.backward_prefetch],
            forward_prefetch=self.forward_prefetch,
            limit_all_gathers=self.limit_all_gathers,
            param_init_fn=initialiser.param_init_fn(),
            device_id=initialiser.device,
            use_orig_params=True,
        )

    def shard_groups(self, name: str, parameter: Tensor, mesh: DeviceMesh, split: Collection[str]) -> Groups:
        """FSDP1's parameters are plain views into a unit's shard: only `split` tells which are tensor-parallel."""
        tensor = (mesh.get_group("tensor"),) if name in split else ()
        return (mesh.get_group("shard"), *tensor)

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert isinstance(model, FullyShardedDataParallel)
        return model.no_sync() if self.accumulate == "hold" and not last else nullcontext()

    def held(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Held:
        """
        A unit's parameters are one flat parameter, padded to equal shards. It has a whole gradient if any of it is trained.

        The optimizer's share is an upper bound where trained and frozen parameters are in one unit.
        """
        aligned = ALIGNMENT // precision.param_bytes
        total = 0
        for parameter in unit.parameters:
            total += -total % aligned + parameter.numel
        shard = -(-total // degrees.shard)
        return Held(shard, shard if unit.trained else 0, min(shard, unit.trained))

    def accumulated(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> int:
        return precision.param_bytes * unit.trained if degrees.shard > 1 else 0

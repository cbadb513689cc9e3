"""FSDP1: each unit's parameters are flattened and sharded as one tensor (FullyShardedDataParallel; Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshrunner.recipes.parallelism.base import Degrees, Parallelism
from meshrunner.recipes.parallelism.mesh import fsdp_mesh, replicas
from meshrunner.recipes.parallelism.unit_sizes import Stored, UnitParameters

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan
    from meshrunner.recipes.precision.base import Precision


class FSDP1(Parallelism):
    """FSDP1 with the same units and degrees of parallelism as `fsdp2`. Units that are resharded after forward use FULL_SHARD.
    Other units use SHARD_GRAD_OP. With `replicate` above 1, the strategies are HYBRID_SHARD and _HYBRID_SHARD_ZERO2."""

    wraps_units: ClassVar[bool] = True

    backward_prefetch: Literal["pre", "post", "none"]
    """Time of the next unit's all-gather in backward. pre: before the current unit's gradients are computed (more overlap, more
    memory); post: after the gradients are computed; none: when backward needs the unit."""
    forward_prefetch: bool
    """Whether to all-gather the next unit before the current unit's forward starts."""
    limit_all_gathers: bool
    """Whether the host queues at most two all-gathers before the device runs them, which saves memory."""

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import CustomPolicy

        hybrid = replicas(mesh) > 1
        always = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        never = ShardingStrategy._HYBRID_SHARD_ZERO2 if hybrid else ShardingStrategy.SHARD_GRAD_OP
        strategies: dict[nn.Module, dict[str, Any]] = {
            model.get_submodule(name): {"sharding_strategy": always if unit.reshard_after_forward else never}
            for name, unit in plan.items()
            if name
        }
        prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
        return FullyShardedDataParallel(
            model,
            device_mesh=fsdp_mesh(mesh),
            # FSDP1 leaves the root unsharded between forward and backward under any strategy.
            sharding_strategy=always,
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

    def shard_groups(
        self, name: str, parameter: Tensor, mesh: DeviceMesh, split: Collection[str]
    ) -> tuple[ProcessGroup, ...]:
        # FSDP1's parameters are plain views into a unit's shard. Only `split` identifies the tensor-parallel ones.
        tensor = (mesh.get_group("tensor"),) if name in split else ()
        return (mesh.get_group("shard"), *tensor)

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[None]:
        return model.no_sync() if self.accumulate == "hold" and not last else nullcontext()

    def after_evaluation(self, model: Any) -> None:
        from torch.distributed.fsdp._runtime_utils import _reshard

        # Without a backward, the root stays gathered, and the next backward would prefetch in the order of the evaluation.
        for unit in model.fsdp_modules(model):
            if unit._handle is not None:
                _reshard(unit, unit._handle, True)
        model._exec_order_data.handles_pre_forward_order.clear()
        model._exec_order_data.handles_post_forward_order.clear()

    def stored(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Stored:
        """Return the size of one shard of a unit's flat parameter. The whole shard has gradients if any parameter is trained."""
        aligned = 16 // precision.param_bytes  # FSDP1 aligns each parameter to 16 bytes of the compute dtype
        total = 0
        for parameter in unit.parameters:
            total += -total % aligned + parameter.numel
        shard = -(-total // degrees.shard)
        trained = min(shard, unit.trained)  # an upper bound if the unit mixes trained and frozen parameters
        held = precision.param_bytes * unit.trained if degrees.shard > 1 else 0
        return Stored(shard, shard if unit.trained else 0, trained, held)

"""FSDP2: each parameter is sharded individually (torch.distributed.fsdp.fully_shard; Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.option import whole
from meshrunner.recipes.parallelism.base import Degrees, Parallelism
from meshrunner.recipes.parallelism.buffers.placement import PLANS, BufferSchedules, predicted
from meshrunner.recipes.parallelism.mesh import fsdp_mesh, replicas
from meshrunner.recipes.parallelism.unit_sizes import Stored, Traffic, UnitParameters, Units, stack_shard_dim

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan
    from meshrunner.recipes.precision.base import Precision

NCCL_BUFFERS = ("process_group", "symmetric")
"""Values of `parallelism.buffers` with which NCCL allocates the communication buffers."""


class FSDP2(Parallelism):
    """A model sharded over `shard` devices. With `replicate` above 1, there are `replicate` sharded copies (HSDP)."""

    wraps_units: ClassVar[bool] = True
    gathers_per_call: ClassVar[bool] = True

    prefetch: Annotated[int, whole(at_least=0)]
    """Units to all-gather ahead. 0: torch's default (1)."""
    cpu_offload: bool
    """Whether parameters, gradients and optimizer state are on the host."""
    buffers: Literal["dynamic", "max_pool", "scheduled", "process_group", "symmetric"] = "dynamic"
    """Memory for communication buffers. dynamic: torch allocates a buffer for each collective. max_pool, scheduled: units have
    buffers at fixed addresses. process_group, symmetric: NCCL allocates the buffers."""

    @property
    def plans_buffers(self) -> bool:
        return self.buffers in PLANS

    @property
    def units_ahead(self) -> int:
        return self.prefetch

    @property
    def capturable(self) -> bool:
        return self.buffers == "dynamic" and not self.cpu_offload and self.expert == 1

    @property
    def offloads(self) -> bool:
        return self.cpu_offload

    def problems(self) -> list[str]:
        found = []
        if self.expert > 1:
            from torch.distributed.fsdp._fully_shard import _fsdp_common

            if not hasattr(_fsdp_common, "ShardPlacementResult"):  # torch 2.11
                found.append(
                    "parallelism.expert: this torch's FSDP2 cannot shard the parameters of one unit over two meshes; "
                    "use torch 2.12 or later, or parallelism.expert=1"
                )
        if self.buffers == "symmetric":
            from torch.distributed.fsdp import FSDPModule

            if not hasattr(FSDPModule, "set_symm_mem_for_comm"):  # torch 2.11
                found.append(
                    "parallelism.buffers: this torch's FSDP2 has no symmetric buffers; use dynamic, max_pool or scheduled"
                )
        return found

    def unsupported(self, device_type: str) -> str | None:
        if device_type == "cuda" or self.buffers not in NCCL_BUFFERS:
            return None
        return f"parallelism.buffers: NCCL allocates {self.buffers} buffers and needs a GPU; use dynamic, max_pool or scheduled"

    def untraceable(self) -> str | None:
        if self.cpu_offload:
            return "parallelism.cpu_offload moves parameters between host and device, which FSDP2 cannot do on the meta device"
        if self.buffers in NCCL_BUFFERS:
            return f"parallelism.buffers={self.buffers} takes memory from NCCL's pools, which exist only on a GPU"
        return super().untraceable()

    def mixes_dtypes(self) -> bool:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__  # from torch 2.15 on

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        network, data_mesh = initialiser.network, fsdp_mesh(mesh)
        policy = MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            # Parameters determine the dtype of activations. Inputs such as the rotary table stay fp32.
            cast_forward_inputs=False,
            **self._own_dtypes(network),
        )
        on_gpu = initialiser.device.type != "cpu"
        placement = stack_placement(network, data_mesh)
        for name, unit in plan.items():  # children before their parents
            module = fully_shard(
                model.get_submodule(name),
                mesh=data_mesh,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
                reshard_after_forward=unit.reshard_after_forward,
                shard_placement_fn=placement,
            )
            if unit.lookup:
                module.set_unshard_in_backward(False)  # the gradient needs the tokens, not the table
            if self.buffers == "process_group":
                module.set_allocate_memory_from_process_group_for_comm(True)
            elif self.buffers == "symmetric":
                module.set_symm_mem_for_comm()
        self._prefetch(model, network)
        if self.plans_buffers:
            from meshrunner.recipes.parallelism.buffers.buffer_pool import install

            install(model, self.buffers, self.prefetch)
        initialiser.materialise(model, offload=self.cpu_offload)
        return model

    def _own_dtypes(self, network: Network) -> dict[str, Any]:
        """Return MixedPrecisionPolicy's argument for parameters that stay in fp32; {} if unneeded or unsupported."""
        fp32 = {parameter for name, parameter in network.named_parameters() if network.stays_fp32(clean_name(name))}
        if not fp32 or not self.mixes_dtypes():
            return {}
        return {"param_dtype_override_fn": lambda parameter: parameter.dtype if parameter in fp32 else None}

    def _prefetch(self, model: nn.Module, network: Network) -> None:
        from torch.distributed.fsdp import FSDPModule

        # With expert parallelism, the host waits for tokens in every block. Without prefetching, all-gathers would start late.
        depth = self.prefetch or int(self.expert > 1)
        if not depth:
            return
        # Skip units that forward calls several times. Each call has a different successor, so no single unit could be prefetched.
        units = [
            module
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule) and name and network.calls(clean_name(name)) == 1
        ]
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
            unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])

    def after_step(self, model: nn.Module) -> dict[str, float]:
        if not self.plans_buffers:
            return {}
        from meshrunner.recipes.parallelism.buffers.buffer_pool import pools_of

        return {"perf/comm_allocations": sum(pool.step_done() for pool in pools_of[model])}

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[None]:
        if self.accumulate == "hold":
            model.set_requires_gradient_sync(last)
        elif self.replicate > 1:
            model.set_requires_all_reduce(last)  # until the last micro batch, replicas accumulate their own gradients
        return nullcontext()

    def after_evaluation(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                # Backward prefetches the units in this list, so it would gather the units of an evaluation needlessly.
                order = module._get_fsdp_state()._comm_ctx.post_forward_order
                for unit in order:
                    unit._post_forward_indices.clear()
                order.clear()

    def traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        stacks = unit.of(is_stack=True)
        if self.expert == 1 or not stacks.parameters:
            return super().traffic(unit, precision, degrees, micro_batches)
        # `expert` already divides the experts, so FSDP shards them over fewer devices than the rest of the unit.
        of_stacks = degrees._replace(shard=degrees.shard // self.expert)
        rest = super().traffic(unit.of(is_stack=False), precision, degrees, micro_batches)
        experts = super().traffic(stacks, precision, of_stacks, micro_batches)
        return Traffic(rest.gathered + experts.gathered, rest.reduced + experts.reduced)

    def stored(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Stored:
        """Return the sizes of a unit's shards. Each parameter is padded along one dimension and divided into equal shards."""
        weights = trained = 0
        for parameter in unit.parameters:
            ranks = degrees.shard // self.expert if parameter.is_stack else degrees.shard
            shard = parameter.padded(ranks) // ranks
            weights += shard
            trained += shard if parameter.trained else 0
        held = precision.reduce_bytes * unit.trained if degrees.shard > 1 else 0
        return Stored(weights, trained, trained, held)

    def buffer_schedules(self, units: Units, precision: Precision, degrees: Degrees) -> BufferSchedules | None:
        if self.expert > 1 or precision.gathers_float8:
            return None
        return predicted(units, precision, degrees.shard, self.prefetch)


def stack_placement(network: Network, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any] | None:
    """Return a `shard_placement_fn` with which `fully_shard` shards stacks of expert matrices; None if there are no stacks."""
    from torch.distributed.tensor import DTensor, Shard

    stacks = {parameter for name, parameter in network.named_parameters() if network.is_stack(clean_name(name))}
    if not stacks:
        return None
    ranks, expert_mesh = mesh.size(-1), network.expert_mesh
    info: FSDPMeshInfo | None = None
    if expert_mesh is not None:
        # Stacks are all-gathered and reduced over a different mesh than other parameters of the unit.
        from torch.distributed.fsdp._fully_shard import _fsdp_common

        ranks = expert_mesh["expert_shard"].size()
        if replicas(expert_mesh) > 1:
            both = expert_mesh["replicate", "expert_shard"]
            info = _fsdp_common.HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
        else:
            info = _fsdp_common.FSDPMeshInfo(expert_mesh["expert_shard"], shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in stacks:
            return None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        shard = Shard(stack_shard_dim(local.shape, ranks))
        return shard if info is None else _fsdp_common.ShardPlacementResult(shard, info)

    return place

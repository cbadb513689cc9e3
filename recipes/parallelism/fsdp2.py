"""FSDP2: each parameter is sharded individually (torch.distributed.fsdp.fully_shard; Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from meshrunner.recipes.option import whole
from meshrunner.recipes.parallelism.base import Degrees, Held, Parallelism
from meshrunner.recipes.parallelism.buffers.plan import PLANS, Schedule
from meshrunner.recipes.parallelism.shards import padded, stack_placement, takes_two_meshes

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision.base import Precision

NCCL_BUFFERS = {
    "process_group": "set_allocate_memory_from_process_group_for_comm",  # torch 2.11
    "symmetric": "set_symm_mem_for_comm",  # torch 2.12
}
"""Value of `buffers` -> the method of a unit that it needs."""


class FSDP2(Parallelism):
    """Sharding over `shard` devices; with `replicate` above 1, that many sharded replicas (HSDP)."""

    wraps_units: ClassVar[bool] = True
    gathers_lookups_again: ClassVar[bool] = False
    frees_after_every_call: ClassVar[bool] = True

    prefetch: Annotated[int, whole(at_least=0)]
    """Units that are all-gathered ahead of the current one; 0: torch's default, which is one."""
    cpu_offload: bool
    """Keep sharded parameters, gradients and optimizer state in host memory; the optimizer runs on the CPU."""
    buffers: Literal["dynamic", "max_pool", "scheduled", "process_group", "symmetric"] = "dynamic"
    """Where communication buffers lie: anywhere (dynamic), each unit's in one place (max_pool, scheduled), or in NCCL memory."""

    @property
    def plans_buffers(self) -> bool:
        return self.buffers in PLANS

    @property
    def units_ahead(self) -> int:
        return self.prefetch

    @property
    def offloads(self) -> bool:
        return self.cpu_offload

    def problems(self) -> list[str]:
        found = []
        if self.expert > 1 and not takes_two_meshes():
            found.append(
                "parallelism.expert: this torch has no FSDP2 that shards the parameters of a unit over two meshes; it needs 2.12"
            )
        if self.buffers in NCCL_BUFFERS and not _has_method(NCCL_BUFFERS[self.buffers]):
            found.append(
                f"parallelism.buffers: this torch has no FSDP2 with {self.buffers}; use dynamic, max_pool or scheduled"
            )
        return found

    def unsupported(self, device_type: str) -> str | None:
        if device_type == "cuda" or self.buffers not in NCCL_BUFFERS:
            return None
        return f"parallelism.buffers: {self.buffers} is memory of NCCL, which needs a GPU; use dynamic, max_pool or scheduled"

    def untraceable(self) -> str | None:
        if self.cpu_offload:
            return "parallelism.cpu_offload moves parameters between host and device, which FSDP2 cannot do on the meta device"
        if self.buffers in NCCL_BUFFERS:
            return f"parallelism.buffers={self.buffers} takes memory from NCCL's pools, which exist only on a GPU"
        return None

    def keeps_some_fp32(self) -> bool:
        return _takes_own_dtypes()

    def apply(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        plan: WrapPlan,
        precision: Precision,
        initialiser: Initialiser,
        expert_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        from meshrunner.recipes.model.init_weights import clean_name
        from meshrunner.recipes.model.network import network_of

        network, names = network_of(model), mesh.mesh_dim_names or ()
        data_mesh = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        policy = MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            # Parameters determine the dtype of activations; inputs such as the rotary table stay fp32.
            cast_forward_inputs=False,
            **_own_dtypes(network),
        )
        on_gpu = initialiser.device.type != "cpu"
        cut = stack_placement(network, data_mesh, expert_mesh)
        for name, unit in plan.items():
            module = model.get_submodule(name)
            fully_shard(
                module,
                mesh=data_mesh,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
                reshard_after_forward=unit.reshard_after_forward,
                shard_placement_fn=cut,
            )
            if unit.lookup:
                assert isinstance(module, FSDPModule)
                module.set_unshard_in_backward(False)  # its gradient follows from the tokens
        units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        # With expert parallelism the host waits in every block for what it is sent, and does not run ahead by itself.
        if ahead := self.prefetch or int(self.expert > 1):
            # What is called several times in a forward has several successors: it is gathered when it is called.
            _prefetch([unit for name, unit in units.items() if name and network.calls(clean_name(name)) == 1], ahead)
        self._choose_buffers(model, units.values())
        initialiser.materialise(model, offload=self.cpu_offload)
        return model

    def _choose_buffers(self, model: nn.Module, units: Iterable[FSDPModule]) -> None:
        if self.plans_buffers:
            from meshrunner.recipes.parallelism.buffers.comm import install

            install(model, self.buffers, self.prefetch)
        for unit in units:
            if self.buffers == "process_group":
                unit.set_allocate_memory_from_process_group_for_comm(True)
            elif self.buffers == "symmetric":
                unit.set_symm_mem_for_comm()

    def after_step(self, model: nn.Module) -> dict[str, float]:
        if not self.plans_buffers:
            return {}
        from meshrunner.recipes.parallelism.buffers.comm import step_done

        return {"perf/comm_allocations": step_done(model)}

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule)
        if self.accumulate == "hold":
            model.set_requires_gradient_sync(last)
        elif self.replicate > 1:
            model.set_requires_all_reduce(last)  # among replicas, whose shards of the gradients are added up until then
        return nullcontext()

    def held(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Held:
        """Every parameter is cut along one dimension and padded to equal shards, and so is its gradient."""
        shards = []
        for p in unit.parameters:
            ranks = degrees.shard // self.expert if p.is_stack else degrees.shard
            shards.append((padded(p, ranks) // ranks, p.trained))
        trained = sum(numel for numel, is_trained in shards if is_trained)
        return Held(sum(numel for numel, _ in shards), trained, trained)

    def accumulated(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> int:
        return precision.reduce_bytes * unit.trained if degrees.shard > 1 else 0

    def buffers_asked_for(
        self, units: Mapping[str, UnitParameters], precision: Precision, degrees: Degrees
    ) -> tuple[Schedule, Schedule] | None:
        if self.expert > 1 or precision.gathers_float8:
            return None
        from meshrunner.recipes.parallelism.buffers.requests import predicted

        return predicted(units, precision, degrees.shard, self.prefetch)


def _has_method(name: str) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, name)


def _takes_own_dtypes() -> bool:
    """From torch 2.15 on."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__


def _own_dtypes(network: Network) -> dict[str, Any]:
    """The mixed-precision policy's argument that keeps single parameters in fp32, where torch has it."""
    from meshrunner.recipes.model.init_weights import clean_name

    kept = {parameter for name, parameter in network.named_parameters() if network.stays_fp32(clean_name(name))}
    if not kept or not _takes_own_dtypes():
        return {}
    return {"param_dtype_override_fn": lambda parameter: parameter.dtype if parameter in kept else None}


def _prefetch(units: list[FSDPModule], depth: int) -> None:
    """All-gather `depth` units ahead, in forward and in backward. units: in forward order, without the root."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])

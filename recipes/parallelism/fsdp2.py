"""FSDP2: each parameter is sharded individually (torch.distributed.fsdp.fully_shard; Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from meshrunner.recipes.option import whole
from meshrunner.recipes.parallelism.base import Degrees, Held, Parallelism

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    from meshrunner.recipes.init_weights import Initialiser
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision import Precision


class FSDP2(Parallelism):
    """Sharding over `shard` devices; with `replicate` above 1, that many sharded replicas (HSDP)."""

    wraps_units: ClassVar[bool] = True
    gathers_lookups_again: ClassVar[bool] = False
    frees_after_every_call: ClassVar[bool] = True

    prefetch: Annotated[int, whole(at_least=0)]
    """Units that are all-gathered ahead of the current one; 0: torch's default, which is one."""
    cpu_offload: bool
    """Keep sharded parameters, gradients and optimizer state in host memory; the optimizer runs on the CPU."""

    def problems(self) -> list[str]:
        if self.expert == 1 or _takes_two_meshes():
            return []
        return [
            "parallelism.expert: this torch has no FSDP2 that shards the parameters of one unit over two meshes; it needs 2.12"
        ]

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
        cut = _stack_placement(network, data_mesh, expert_mesh)
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
        # With expert parallelism the host waits in every block for what it is sent, and does not run ahead by itself.
        if ahead := self.prefetch or int(self.expert > 1):
            # What is called several times in a forward has several successors: it is gathered when it is called.
            repeated: set[nn.Module] = {model.get_submodule(name) for name in plan if network.calls(name) > 1}
            once = (module for module in model.modules() if module not in repeated)
            units: list[FSDPModule] = [module for module in once if isinstance(module, FSDPModule)]
            _prefetch(units[1:], ahead)
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
        """Every parameter is cut along one dimension and padded to equal shards, and so is its gradient."""
        shards = []
        for p in unit.parameters:
            ranks = degrees.shard // self.expert if p.is_stack else degrees.shard
            dim = stack_shard_dim(p.shape, ranks) if p.is_stack else 0
            shards.append((-(-p.shape[dim] // ranks) * p.numel // p.shape[dim], p.trained))
        trained = sum(numel for numel, is_trained in shards if is_trained)
        return Held(sum(numel for numel, _ in shards), trained, trained)

    def accumulated(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> int:
        return precision.reduce_bytes * unit.trained if degrees.shard > 1 else 0


def stack_shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension that FSDP2 cuts a stack of matrices along: by matrices, unless only their rows can be shared out evenly."""
    return int(shape[0] % ranks > 0 and shape[1] % ranks == 0)


def _takes_two_meshes() -> bool:
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(_fsdp_common, "ShardPlacementResult")


def _takes_own_dtypes() -> bool:
    """From torch 2.15 on."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__


def _own_dtypes(network: Network) -> dict[str, Any]:
    """The mixed-precision policy's argument that keeps single parameters in fp32, where torch has it."""
    from meshrunner.recipes.init_weights import clean_name

    kept = {parameter for name, parameter in network.named_parameters() if network.stays_fp32(clean_name(name))}
    if not kept or not _takes_own_dtypes():
        return {}
    return {"param_dtype_override_fn": lambda parameter: parameter.dtype if parameter in kept else None}


def _stack_placement(
    network: Network, data_mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> Callable[[nn.Parameter], Any] | None:
    """The `shard_placement_fn` of a network with stacks of experts: along which dimension and over which ranks each is cut."""
    from torch.distributed.tensor import DTensor, Shard

    from meshrunner.recipes.init_weights import clean_name

    stacks = {parameter for name, parameter in network.named_parameters() if network.is_stack(clean_name(name))}
    if not stacks:
        return None
    mesh = data_mesh
    info: FSDPMeshInfo | None = None
    if expert_mesh is not None:
        # Inside a unit on one mesh, these parameters are gathered and reduced over another.
        from torch.distributed.fsdp._fully_shard import _fsdp_common

        if "replicate" in (expert_mesh.mesh_dim_names or ()):
            mesh = expert_mesh["replicate", "expert_shard"]
            info = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        else:
            mesh = expert_mesh["expert_shard"]
            info = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in stacks:
            return None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        shard = Shard(stack_shard_dim(local.shape, mesh.size(-1)))
        return shard if info is None else _fsdp_common.ShardPlacementResult(shard, info)

    return place


def _prefetch(units: list[FSDPModule], depth: int) -> None:
    """All-gather `depth` units ahead, in forward and in backward. units: in forward order, without the root."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])

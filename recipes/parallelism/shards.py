"""How FSDP2 cuts parameters into shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_plan import LocalParameter


def stack_shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension that a stack of matrices is cut along: by matrices, unless only their rows can be shared out evenly."""
    return int(shape[0] % ranks > 0 and shape[1] % ranks == 0)


def padded(parameter: LocalParameter, ranks: int) -> int:
    """Elements of a parameter once the dimension that it is cut along is padded to equal shards."""
    dim = stack_shard_dim(parameter.shape, ranks) if parameter.is_stack else 0
    return -(-parameter.shape[dim] // ranks) * ranks * parameter.numel // parameter.shape[dim]


def takes_two_meshes() -> bool:
    """Whether this torch can shard the parameters of one unit over two meshes: from 2.12."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(_fsdp_common, "ShardPlacementResult")


def stack_placement(
    network: Network, data_mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> Callable[[nn.Parameter], Any] | None:
    """The `shard_placement_fn` of a network with stacks of experts: along which dimension and over which ranks each is cut."""
    from torch.distributed.tensor import DTensor, Shard

    from meshrunner.recipes.model.init_weights import clean_name

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

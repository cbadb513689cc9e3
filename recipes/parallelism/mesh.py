"""The device mesh: one dimension for each degree above 1, named after the degree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrunner.recipes.parallelism.base import Degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def mesh_dims(degrees: Degrees) -> dict[str, int]:
    """Name -> size, outermost first. `shard` is always included, so that the mesh is never empty."""
    return {name: size for name, size in degrees._asdict().items() if size > 1 or name == "shard"}


def build_mesh(device_type: str, degrees: Degrees) -> DeviceMesh:
    """The mesh: `replicate` outermost (across nodes), `tensor` innermost (adjacent devices, the fastest links)."""
    from torch.distributed.device_mesh import init_device_mesh

    dims = mesh_dims(degrees)
    return init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def expert_mesh_dims(replicate: int, shard: int, expert: int) -> dict[str, int]:
    """Name -> size of the dimensions of the experts' mesh, outermost first: replicate x shard, shared out anew."""
    own = {"expert_shard": shard // expert, "expert": expert}
    return {"replicate": replicate} | own if replicate > 1 else own


def build_expert_mesh(mesh: DeviceMesh, expert: int) -> DeviceMesh:
    """The ranks of replicate x shard once more, as replicate x expert_shard x expert: neighbours exchange tokens."""
    from torch.distributed.device_mesh import init_device_mesh

    replicate = mesh["replicate"].size() if "replicate" in (mesh.mesh_dim_names or ()) else 1
    dims = expert_mesh_dims(replicate, mesh["shard"].size(), expert)
    return init_device_mesh(mesh.device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def data_groups(mesh: DeviceMesh) -> tuple[ProcessGroup, ...]:
    """The ranks whose tokens differ: all as one group, or with tensor parallelism a group for each other dimension."""
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        return tuple(mesh.get_group(name) for name in names if name != "tensor" and mesh[name].size() > 1)
    from torch.distributed import group

    return (group.WORLD,) if group.WORLD is not None and mesh.size() > 1 else ()


def data_rank(mesh: DeviceMesh) -> int:
    """This rank's index among the data-parallel ranks: replicate x shard, row-major."""
    names = mesh.mesh_dim_names or ()
    replicate = mesh.get_local_rank("replicate") if "replicate" in names else 0
    return replicate * mesh["shard"].size() + mesh.get_local_rank("shard")

"""Build the device mesh, which has one dimension for each degree above 1. Split models by tensor parallelism (Shoeybi et al.
2019), sequence parallelism (Korthikanti et al. 2022) and expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrunner.recipes.parallelism.base import Degrees, Parallelism

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.network import Network


def mesh_dims(degrees: Degrees) -> dict[str, int]:
    """Return the sizes of the mesh dimensions, outermost first. Keep `shard` even if its size is 1: a mesh cannot be empty."""
    sizes = {"pipeline": degrees.pipeline, "replicate": degrees.replicate}
    sizes |= {"shard": degrees.shard, "tensor": degrees.tensor}
    return {name: size for name, size in sizes.items() if size > 1 or name == "shard"}


def expert_mesh_dims(replicate: int, shard: int, expert: int, pipeline: int) -> dict[str, int]:
    """Return the sizes of the expert mesh's dimensions, outermost first. `expert`, whose ranks exchange tokens, is innermost."""
    sizes = {"pipeline": pipeline, "replicate": replicate, "expert_shard": shard // expert, "expert": expert}
    return {name: size for name, size in sizes.items() if size > 1 or name.startswith("expert")}


def build_mesh(device_type: str, degrees: Degrees) -> DeviceMesh:
    """Build the mesh. `pipeline` is outermost (across nodes), and `tensor` innermost (adjacent devices, the fastest links)."""
    return named_mesh(device_type, mesh_dims(degrees))


def named_mesh(device_type: str, dims: dict[str, int]) -> DeviceMesh:
    """Build a mesh over all ranks. dims: sizes, keyed by the name of the dimension, outermost first."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def place(mesh: DeviceMesh, degrees: Degrees) -> tuple[int, int]:
    """Return the index of this rank's set of sequences, and the rank's index among the `context` devices that share the set."""
    return divmod(mesh.get_rank() % (degrees.devices // degrees.pipeline) // degrees.tensor, degrees.context)


def context_group(mesh: DeviceMesh, layout: Parallelism) -> ProcessGroup:
    """Return the group of the ranks that share this rank's sequences."""
    # FSDP needs shard x context as one dimension, so `context` is a dimension of a second mesh over the same ranks.
    data = mesh.size() // (layout.context * layout.tensor)
    dims = {"data": data, "context": layout.context, "tensor": layout.tensor}
    return named_mesh(mesh.device_type, dims).get_group("context")


def replicas(mesh: DeviceMesh) -> int:
    """Return the size of the mesh's `replicate` dimension, or 1 if the mesh has no such dimension."""
    return mesh["replicate"].size() if "replicate" in (mesh.mesh_dim_names or ()) else 1


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh that FSDP uses: `shard`. With several replicas, also `replicate` (hybrid sharding)."""
    return mesh["replicate", "shard"] if replicas(mesh) > 1 else mesh["shard"]


def data_groups(mesh: DeviceMesh) -> tuple[ProcessGroup, ...]:
    """Return this rank's group in each mesh dimension except `tensor`. A sum over all these groups counts each token once."""
    names = mesh.mesh_dim_names or ()
    return tuple(mesh.get_group(name) for name in names if name != "tensor" and mesh[name].size() > 1)


def split_model(network: Network, mesh: DeviceMesh, layout: Parallelism) -> frozenset[str]:
    """Split a meta-device network over `tensor` or `expert` devices, in place. Return the names of tensor-parallel parameters."""
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    if layout.tensor > 1:
        plan = network.tensor_plan(layout.sequence_parallel, layout.loss_parallel)
        parallelize_module(network, mesh["tensor"], plan)
        network.tie_weights()
        for module in network.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(_wait_for_collective)
    tensor_parallel = frozenset(
        name
        for name, parameter in network.named_parameters()
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
    )
    if layout.expert > 1:
        from meshrunner.recipes.model.experts.feed_forward import split_over_experts

        dims = expert_mesh_dims(replicas(mesh), mesh["shard"].size(), layout.expert, layout.pipeline)
        split_over_experts(network, named_mesh(mesh.device_type, dims))
    return tensor_parallel


def _wait_for_collective(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Wait until an embedding's collective has ended. An unfinished output would lose its gradient inside a compiled block."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor

    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output  # type: ignore[no-untyped-call]

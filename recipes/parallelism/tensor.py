"""Splitting a network before data parallelism of any kind: over `tensor` devices, or its experts over `expert` devices.

Tensor and sequence parallelism: Shoeybi et al. 2019, Korthikanti et al. 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from meshrunner.recipes.parallelism.mesh import expert_mesh_dims, named_mesh, replicas

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.base import Parallelism


def split_model(network: Network, mesh: DeviceMesh, layout: Parallelism) -> frozenset[str]:
    """Split a network on meta in place, as its layout says. Return the names of the tensor-parallel parameters."""
    if layout.tensor > 1:
        plan = network.tensor_plan(layout.sequence_parallel, layout.loss_parallel)
        parallelize_module(network, mesh["tensor"], plan)
        network.tie_weights()
        for name in network.collective_outputs():
            network.get_submodule(name).register_forward_hook(_wait_for_collective)
    tensor_parallel = frozenset(
        name
        for name, parameter in network.named_parameters()
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
    )
    if layout.expert > 1:
        from meshrunner.recipes.model.experts.feed_forward import split_over_experts

        dims = expert_mesh_dims(replicas(mesh), mesh["shard"].size(), layout.expert)
        split_over_experts(network, named_mesh(mesh.device_type, dims))
    return tensor_parallel


def _wait_for_collective(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Wait for an asynchronous collective. An unfinished result would lose its gradient in a compiled block."""
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output  # type: ignore[no-untyped-call]

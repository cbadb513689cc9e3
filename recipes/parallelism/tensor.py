"""Splitting a network before data parallelism of any kind: over `tensor` devices, or its experts over `expert` devices.

Tensor and sequence parallelism: Shoeybi et al. 2019, Korthikanti et al. 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from meshrunner.recipes.parallelism.mesh import build_expert_mesh

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.base import Parallelism


def split_model(network: Network, mesh: DeviceMesh, layout: Parallelism) -> frozenset[str]:
    """Split a network on meta in place, as its layout says. Return the names of the tensor-parallel parameters."""
    if layout.tensor > 1:
        split_over_tensor(
            network, mesh["tensor"], sequence_parallel=layout.sequence_parallel, loss_parallel=layout.loss_parallel
        )
    tensor_parallel = frozenset(
        name
        for name, parameter in network.named_parameters()
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
    )
    if layout.expert > 1:
        from meshrunner.recipes.model.experts.split import split_over_experts

        split_over_experts(network, build_expert_mesh(mesh, layout.expert))
    return tensor_parallel


def split_over_tensor(network: Network, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Split a network on meta in place over a 1-d mesh. With loss_parallel the logits are a DTensor sharded on the vocabulary."""
    parallelize_module(network, mesh, network.tensor_plan(sequence_parallel, loss_parallel))
    network.tie_weights()
    for name in network.collective_outputs():
        network.get_submodule(name).register_forward_hook(_wait_for_collective)


def _wait_for_collective(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Wait for an asynchronous collective. An unfinished result would lose its gradient in a compiled block."""
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output  # type: ignore[no-untyped-call]

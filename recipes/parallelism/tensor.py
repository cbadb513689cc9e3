"""Tensor, sequence and loss parallelism over the mesh's `tensor` dimension (Shoeybi et al. 2019; Korthikanti et al. 2022).

It is applied before data parallelism, under any kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.network import Network


def split_over_tensor(network: Network, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Split a network on meta in place over a 1-d mesh; loss_parallel: the logits are a DTensor, sharded over the vocabulary."""
    parallelize_module(network, mesh, network.tensor_plan(sequence_parallel, loss_parallel))
    network.tie_weights()
    for name in network.collective_outputs():
        network.get_submodule(name).register_forward_hook(_wait_for_collective)


def split_parameters(network: Network) -> frozenset[str]:
    """Names of the parameters that are sharded over the tensor-parallel ranks."""
    return frozenset(
        name
        for name, parameter in network.named_parameters()
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
    )


def _wait_for_collective(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Wait for an asynchronous collective: if its result entered a compiled block unfinished, its gradient would be lost."""
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output  # type: ignore[no-untyped-call]

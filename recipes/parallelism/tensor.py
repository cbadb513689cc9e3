"""Tensor, sequence and loss parallelism: a network's matrix products split over the mesh's `tensor` dimension.

It applies under any kind, before data parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022 for the sequence).
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
    """
    Split a network on meta in place.

    Args:
        mesh: the 1-d tensor-parallel mesh.
        sequence_parallel: between the matrix products each rank holds its part of the sequence instead of all of it.
        loss_parallel: the logits stay split over the vocabulary, as a DTensor.
    """
    parallelize_module(network, mesh, network.tensor_plan(sequence_parallel, loss_parallel))
    network.tie_weights()
    for name in network.tensor_entries():
        network.get_submodule(name).register_forward_hook(_wait)


def split_parameters(network: Network) -> frozenset[str]:
    """Names of the parameters of which a tensor-parallel rank holds only a part."""
    return frozenset(
        name
        for name, parameter in network.named_parameters()
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
    )


def _wait(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """A collective's result that is still on its way must not enter a compiled block: its gradient would be lost."""
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output  # type: ignore[no-untyped-call]

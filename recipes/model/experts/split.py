"""Experts on several ranks: whole ones on each with expert parallelism, a part of every one with tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward, GroupedExperts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.network import Network

SPLIT_DIMS = {"w1": 2, "w3": 2, "w2": 1}
"""Stack of experts -> the dimension that tensor parallelism splits: the hidden width of every expert."""


def split_over_experts(network: Network, mesh: DeviceMesh) -> None:
    """Put every block's experts on the ranks of the mesh's `expert` dimension, in place, on meta."""
    group = mesh.get_group("expert")
    for module in network.modules():
        if isinstance(module, ExpertFeedForward):
            module.expert_group = group
            module.experts.ranks = group.size()
            for name in SPLIT_DIMS:
                _shard(module.experts, name, mesh["expert"], 0)


class SplitExperts(ParallelStyle):
    """Tensor parallelism of a block's experts: every rank routes all tokens and holds a part of every expert's width."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def split_dims(self, module: nn.Module) -> dict[str, int]:
        """Name of a parameter -> the dimension that is split."""
        return {f"experts.{name}": dim for name, dim in SPLIT_DIMS.items()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ExpertFeedForward)
        module.tensor_group = module.router.tensor_group = device_mesh.get_group()
        module.sequence_parallel = self.sequence_parallel
        for name, dim in SPLIT_DIMS.items():
            _shard(module.experts, name, device_mesh, dim)
        return module


def _shard(experts: GroupedExperts, name: str, mesh: DeviceMesh, dim: int) -> None:
    whole = experts.get_parameter(name)
    part = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    experts.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))

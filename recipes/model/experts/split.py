"""Experts on several ranks: expert parallelism gives each rank whole experts, tensor parallelism a part of every expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward
from meshrunner.recipes.model.tensor_plan import shard_parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.network import Network

SPLIT_DIMS = {"w1": 2, "w3": 2, "w2": 1}
"""Stack of experts -> the dimension that tensor parallelism splits: the hidden width of every expert."""


def split_over_experts(network: Network, mesh: DeviceMesh) -> None:
    """Shard every block's experts over the `expert` dimension of the mesh, in place, on meta."""
    network.expert_mesh = mesh
    group = mesh.get_group("expert")
    for module in network.modules():
        if isinstance(module, ExpertFeedForward):
            module.expert_group = group
            module.experts.ranks = group.size()
            for name in SPLIT_DIMS:
                shard_parameter(module.experts, name, mesh["expert"], 0)


class SplitExperts(ParallelStyle):
    """Tensor parallelism of a block's experts: every rank routes all tokens and holds a part of every expert's width."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def split_dims(self, module: nn.Module) -> dict[str, int]:
        """Return the dimension that is split of each parameter, by name."""
        return {f"experts.{name}": dim for name, dim in SPLIT_DIMS.items()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ExpertFeedForward)
        module.tensor_group = module.router.tensor_group = device_mesh.get_group()
        module.sequence_parallel = self.sequence_parallel
        for name, dim in SPLIT_DIMS.items():
            shard_parameter(module.experts, name, device_mesh, dim)
        return module

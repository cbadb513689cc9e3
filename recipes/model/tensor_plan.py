"""Tensor-parallel styles. Heads and FFN width are split; the stream between is sharded over the sequence or replicated.

A module that can be split has a method `styles(sequence_parallel)`, which returns the styles of its parts by their names in
it, and its own under "". `Transformer.tensor_plan` collects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

    TensorPlan = dict[str, ParallelStyle]


def stream_placement(sequence_parallel: bool) -> Placement:
    """Return how the residual stream, [batch, seq, dim], is placed on the tensor-parallel devices."""
    from torch.distributed.tensor import Replicate, Shard

    return Shard(1) if sequence_parallel else Replicate()


def matmul_styles(into: Iterable[str], out: str, sequence_parallel: bool, other_inputs: int = 0) -> TensorPlan:
    """
    Split a module's linear layers `into`, which read the stream, by columns and its layer `out` by rows.

    Megatron-LM does so (Shoeybi et al. 2019). `other_inputs` is the number of inputs of the module besides the stream.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    stream = stream_placement(sequence_parallel)
    plan: TensorPlan = {layer: ColwiseParallel() for layer in into}
    plan[out] = RowwiseParallel(output_layouts=stream)
    if sequence_parallel:
        # All-gather the stream once per module, not once for each layer that reads it.
        others = (None,) * other_inputs
        plan[""] = PrepareModuleInput(input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others))
    return plan


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a parameter by its shard along a dimension. Every rank slices its own copy; nothing is sent."""
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = module.get_parameter(name)
    shard = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))

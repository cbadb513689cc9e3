"""Tensor-parallel styles of the parts of a block, by module name. `Network.tensor_plan` is assembled from them.

Heads and FFN width are split. Activations between the split parts are sharded over the sequence or replicated. Without
sequence parallelism the norms stay plain tensors: every rank computes the same gradient for them.
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


def attention_plan(name: str, sequence_parallel: bool) -> TensorPlan:
    """Split the heads of an `Attention`, whose inputs are the stream and the rotary table."""
    return matmul_plan(name, ("wq", "wk", "wv"), "wo", sequence_parallel, other_inputs=1)


def feed_forward_plan(name: str, sequence_parallel: bool, into: Iterable[str] = ("w1", "w3")) -> TensorPlan:
    """Split the hidden width of a feed-forward network, whose linear layers `into` read the stream."""
    return matmul_plan(name, into, "w2", sequence_parallel)


def norm_plan(names: Iterable[str], sequence_parallel: bool) -> TensorPlan:
    """Run norms of the stream on sequence shards, if the stream is sharded."""
    from torch.distributed.tensor.parallel import SequenceParallel

    return {name: SequenceParallel() for name in names if sequence_parallel}


def matmul_plan(name: str, into: Iterable[str], out: str, sequence_parallel: bool, other_inputs: int = 0) -> TensorPlan:
    """
    Split the linear layers `into` of a module by columns and its layer `out` by rows (Shoeybi et al. 2019, Megatron-LM).

    Args:
        other_inputs: number of inputs of the module besides the stream.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    stream = stream_placement(sequence_parallel)
    plan: TensorPlan = {f"{name}.{layer}": ColwiseParallel() for layer in into}
    plan[f"{name}.{out}"] = RowwiseParallel(output_layouts=stream)
    if sequence_parallel:
        # All-gather the stream once per module, not once for each layer that reads it.
        others = (None,) * other_inputs
        plan[name] = PrepareModuleInput(input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others))
    return plan


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a parameter by its shard along a dimension. Every rank slices its own copy; nothing is sent."""
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = module.get_parameter(name)
    shard = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))

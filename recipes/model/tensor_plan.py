"""Tensor-parallel styles. Heads and FFN width are split. The residual stream is sharded over the sequence or replicated. A module
that can be split has a method `styles(sequence_parallel)`, which returns a dict: name of a submodule -> style. The name "" is the
module itself. `Transformer.tensor_plan` collects the styles."""

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

TensorPlan = dict[str, ParallelStyle]


class SplitParameters(ParallelStyle):
    """Shards each parameter named in `dims` along the given dimension. Ranks slice their full copies, so no data is sent."""

    def __init__(self, dims: dict[str, int]) -> None:
        super().__init__()
        self.dims = dims

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for path, dim in self.dims.items():
            owner, _, name = path.rpartition(".")
            whole = module.get_parameter(path)
            shard = distribute_tensor(whole, device_mesh, [Shard(dim)], src_data_rank=None)
            module.get_submodule(owner).register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))
        return module


def stream_placement(sequence_parallel: bool) -> Placement:
    """Return the placement of the residual stream, [batch, seq, dim], on the tensor-parallel devices."""
    return Shard(1) if sequence_parallel else Replicate()


def matmul_styles(into: Iterable[str], out: str, sequence_parallel: bool, other_inputs: int = 0) -> TensorPlan:
    """Return styles as in Megatron-LM (Shoeybi et al. 2019). The layers `into` read the residual stream and are split by columns.
    The layer `out` adds to the stream and is split by rows. other_inputs: number of the module's inputs besides the stream."""
    stream = stream_placement(sequence_parallel)
    plan: TensorPlan = {layer: ColwiseParallel() for layer in into}
    plan[out] = RowwiseParallel(output_layouts=stream)
    if sequence_parallel:
        # All-gather the stream once per module, not once for each layer that reads it.
        others = (None,) * other_inputs
        plan[""] = PrepareModuleInput(input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others))
    return plan

"""How tensor parallelism splits the parts of a block: module name -> style, of which `Network.tensor_plan` is put together.

Heads and FFN width are split; activations in between are sharded over the sequence or replicated. Without sequence parallelism
the norms are plain tensors, so their gradients are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

    TensorPlan = dict[str, ParallelStyle]


def stream(sequence_parallel: bool) -> Placement:
    """How the residual stream lies on the devices."""
    from torch.distributed.tensor import Replicate, Shard

    return Shard(1) if sequence_parallel else Replicate()


def attention_plan(name: str, sequence_parallel: bool) -> TensorPlan:
    """Of an `Attention`, which is called with the stream and the rotary table."""
    return product_plan(name, ("wq", "wk", "wv"), "wo", sequence_parallel, others=1)


def feed_forward_plan(name: str, sequence_parallel: bool, into: Iterable[str] = ("w1", "w3")) -> TensorPlan:
    """Of a feed-forward network. into: its products that read the stream."""
    return product_plan(name, into, "w2", sequence_parallel)


def norm_plan(names: Iterable[str], sequence_parallel: bool) -> TensorPlan:
    """Of norms of the stream."""
    from torch.distributed.tensor.parallel import SequenceParallel

    return {name: SequenceParallel() for name in names if sequence_parallel}


def product_plan(name: str, into: Iterable[str], out: str, sequence_parallel: bool, others: int = 0) -> TensorPlan:
    """Of a module whose products `into` are split by columns, and `out` by rows. others: its inputs beside the stream."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    between = stream(sequence_parallel)
    plan: TensorPlan = {f"{name}.{product}": ColwiseParallel() for product in into}
    plan[f"{name}.{out}"] = RowwiseParallel(output_layouts=between)
    if sequence_parallel:
        rest = (None,) * others
        plan[name] = PrepareModuleInput(input_layouts=(between, *rest), desired_input_layouts=(Replicate(), *rest))
    return plan

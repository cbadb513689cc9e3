"""What an operator costs: the work of its arithmetic and the bytes it moves, from the shapes of its arguments and results."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from meshrunner.runner.ledger.memory_ledger import tensors_in

FREE = {
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "set_",
        "resize_",
        "record_stream",
    ),
    *("detach", "lift_fresh", "split_with_sizes", "_reshape_alias", "_local_scalar_dense"),
}
"""Of aten: they compute nothing."""
PRODUCTS = {
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "convolution_backward",
    "grouped_mm",
    "grouped_mm_weights",
}
COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}
"""Operator of torch -> collective of the log."""


class Traits(NamedTuple):
    """What is the same of all calls of an operator."""

    name: str
    kind: str | None
    """Of `Operator`, or `collective`; None: it costs nothing."""
    written: tuple[int, ...]
    """Arguments, by position, that it writes besides its results."""
    flops: Any
    """torch's formula; None: it has none."""


@cache
def traits(func: Any) -> Traits:
    """What an operator is, from its schema."""
    schema = func._schema
    space, _, short = schema.name.partition("::")
    written = tuple(
        i
        for i, argument in enumerate(schema.arguments)
        # A fused optimizer may unscale gradients in place; ours does not ask for that.
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
    )
    flops = flop_registry.get(func._overloadpacket)
    if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return Traits(schema.name, "collective" if short in COLLECTIVES else None, written, None)
    if space == "prim" or func.is_view or (space == "aten" and short in FREE):
        return Traits(schema.name, None, written, None)
    if short in PRODUCTS:
        return Traits(schema.name, "matmul", written, flops)
    if "scaled_dot_product" in short:
        return Traits(schema.name, "attention_backward" if "backward" in short else "attention", written, flops)
    return Traits(schema.name, "memory", written, None)


class Cost(NamedTuple):
    """The work of one call."""

    flops: int
    nbytes: int
    dtype: str


def cost(what: Traits, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], result: Any) -> Cost:
    """
    The work of one call.

    Args:
        inputs: the tensors among args and kwargs.
    """
    results = list(tensors_in((result,)))
    short = what.name.partition("::")[2]
    moved = sum(map(nbytes, inputs))
    for position in what.written:
        moved += sum(map(nbytes, tensors_in(args[position : position + 1])))
    if what.written:
        moved += sum(map(nbytes, tensors_in((kwargs.get("out"),))))
    else:
        moved += sum(map(nbytes, results))
    if short in ("embedding", "index_select", "gather"):
        moved = 2 * sum(map(nbytes, results))  # not the whole table
    largest = max(inputs or results, key=nbytes, default=None)
    dtype = str(largest.dtype).removeprefix("torch.") if largest is not None else ""
    return Cost(_flops(what, args, kwargs, result), moved, dtype)


def _flops(what: Traits, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    if what.name in ("meshrunner::grouped_mm", "meshrunner::grouped_mm_weights"):
        x, other = args[0], args[1]  # every row of x goes through one matrix, [rows, in] x [in, out]
        return int(2 * x.shape[0] * x.shape[1] * other.shape[-1])
    if what.flops is None:
        return 0
    found = int(what.flops(*args, **kwargs, out_val=result))
    return found // 2 if what.kind != "matmul" and _is_causal(what, args, kwargs) else found


def _is_causal(what: Traits, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether half of an attention's scores are masked and so are not computed."""
    return kwargs.get("is_causal") is True or any(value is True for value in args)


def nbytes(tensor: Tensor) -> int:
    """What its elements take."""
    return tensor.numel() * tensor.element_size()

"""Computes the cost of an operator from its shapes: FLOPs, and bytes read and written in device memory."""

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from meshrunner.runner.ledger.memory_ledger import tensors_in

WITHOUT_WORK = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_", "resize_"),
    *("record_stream", "detach", "lift_fresh", "split_with_sizes", "_reshape_alias", "_local_scalar_dense"),
}
"""aten operators that compute nothing and therefore cost no time."""
MATMULS = {
    *("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "convolution_backward"),
    *("grouped_mm", "grouped_mm_weights"),
}
COLLECTIVE_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
"""Names of collectives. Without underscores, a torch operator such as `_allgather_base_` begins with one of these names."""


class Traits(NamedTuple):
    """Properties shared by all calls of an operator."""

    name: str
    kind: str | None
    """Kind of the operator: a value of `Operator.kind`, `collective`, or None if the operator costs nothing."""
    written: tuple[int, ...]
    """Positions of the arguments that the operator writes."""
    flops: Any
    """torch's FLOP formula for the operator, or None."""
    is_causal: int = 0
    """Position of the argument `is_causal` of an attention operator."""


@cache
def traits(func: Any) -> Traits:
    schema = func._schema
    space, _, short = schema.name.partition("::")
    written = tuple(
        i
        for i, argument in enumerate(schema.arguments)
        # A fused optimizer's schema marks `grads` as written, because it can unscale gradients, but no recipe enables this.
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
    )
    flops = flop_registry.get(func._overloadpacket)
    if space in COLLECTIVE_SPACES:
        return Traits(schema.name, "collective" if collective(short) else None, written, None)
    if space == "prim" or func.is_view or (space == "aten" and short in WITHOUT_WORK):
        return Traits(schema.name, None, written, None)
    if short in MATMULS:
        return Traits(schema.name, "matmul", written, flops)
    if "scaled_dot_product" in short:
        kind = "attention_backward" if "backward" in short else "attention"
        names = [argument.name for argument in schema.arguments]
        return Traits(schema.name, kind, written, flops, names.index("is_causal") if "is_causal" in names else -1)
    return Traits(schema.name, "memory", written, None)


def collective(operator: str) -> str | None:
    """Return the name in COLLECTIVES that matches a torch operator (`all_gather` for `_allgather_base_`), or None."""
    squeezed = operator.replace("_", "")
    return next((name for name in COLLECTIVES if squeezed.startswith(name.replace("_", ""))), None)


def cost(
    operator: Traits, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], result: Any
) -> tuple[int, str, int]:
    """Return the `flops`, `dtype` and `nbytes` of a call (see `Operator`). `inputs` are the tensors among the arguments."""
    results = list(tensors_in((result,)))
    short = operator.name.partition("::")[2]
    if short in ("embedding", "index_select", "gather"):
        moved = 2 * nbytes_of(results)  # lookups read only the rows they return, not the whole table
    else:
        moved = nbytes_of(inputs)
        moved += sum(nbytes_of(args[position : position + 1]) for position in operator.written)
        moved += nbytes_of((kwargs.get("out"),)) if operator.written else nbytes_of(results)
    largest = max(inputs or results, key=lambda tensor: tensor.nbytes, default=None)
    dtype = str(largest.dtype).removeprefix("torch.") if largest is not None else ""
    return _flops(operator, args, kwargs, result), dtype, moved


def nbytes_of(values: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(values))


def _flops(operator: Traits, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    if operator.name in ("meshrunner::grouped_mm", "meshrunner::grouped_mm_weights"):
        x, other = args[0], args[1]  # each row of x [rows, in] is multiplied by one matrix [in, out]
        return int(2 * x.shape[0] * x.shape[1] * other.shape[-1])
    if operator.flops is None:
        return 0
    is_causal = kwargs.get("is_causal") or any(x is True for x in args[operator.is_causal : operator.is_causal + 1])
    skipped = 0.0
    if operator.kind != "matmul":
        lengths = [x.shape[2] for x in args[:3]]
        # A query sees the keys up to its own position. The last query sees all keys, even if there are more keys than queries.
        skipped = min(lengths) / (2 * max(lengths)) if is_causal else 0.0
        # Count keys and values once per query head, because the formula of torch 2.11 needs equal numbers of heads.
        heads = max(x.shape[1] for x in args[:3])
        args = [(x.shape[0], heads, *x.shape[2:]) if isinstance(x, Tensor) and x.dim() == 4 else x for x in args]
    return round(int(operator.flops(*args, **kwargs, out_val=result)) * (1 - skipped))

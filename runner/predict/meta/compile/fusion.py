"""Which results of a compiled graph get memory, and what kernels read: torch's inductor fuses everything else."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

OWN_KERNELS = {
    *("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "convolution_backward"),
    *("embedding_dense_backward", "index_put", "index_put_", "_foreach_norm", "sort", "topk", "nonzero"),
    *("_local_scalar_dense", "empty", "bincount", "histc"),
}
"""Of aten: inductor calls torch's own kernel. Likewise attention."""
REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var_mean", "prod", "any", "all", "logsumexp"),
    *("cumsum", "cumprod"),
}
"""A kernel ends with them: what uses their result reads it from memory."""
LOOKUPS = {"index", "embedding", "gather", "index_select"}
"""They read as much as they return, not the whole table."""
VIEWS = {"_unsafe_view", "reshape", "view", "alias", "detach", "wait_tensor"}
"""Besides those whose schema says so."""
READS_TO_INLINE = 4
"""A result that is used more than once is computed anew for each use, if so few tensors are read for it
(`torch._inductor.config.realize_reads_threshold`)."""


class GraphMemory(NamedTuple):
    """What a graph does to memory. What is in none of these is no work and no memory: it is fused into others, or a view."""

    extern: set[Node]
    """Operators that run as without the compiler."""
    read: dict[Node, dict[Node, int]]
    """Fused kernels, by the result that each gives memory -> the results in memory that it reads -> bytes."""


def memory_of(graph: Graph) -> GraphMemory:
    """What a graph does to memory."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    extern = {node for node in calls if _is_extern(node)}
    needed = {_base(each) for node in (*extern, graph.output_node()) for each in node.all_input_nodes}
    in_memory = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")} | extern
    reads: dict[Node, dict[Node, int]] = {}
    kernels: dict[Node, dict[Node, int]] = {}
    for node in calls:
        if node in extern or _is_view(node):
            continue
        if node.target is operator.getitem:  # one of several results
            of = node.all_input_nodes[0]
            if of in in_memory:
                in_memory.add(node)
            reads[node] = reads.get(of, {})
            continue
        read = reads[node] = _reads(node, reads, in_memory)
        reused = len(node.users) > 1 and len(read) > READS_TO_INLINE
        if node in needed or _short(node) in REDUCTIONS or _is_written(node) or reused:
            in_memory.add(node)
            kernels[node] = read
    return GraphMemory(extern, kernels)


def nbytes(node: Node) -> int:
    """Bytes of a node's result."""
    return sum(each.numel() * each.element_size() for each in _values(node))


def _values(node: Node) -> list[Tensor]:
    """A node's results."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return [each for each in values if isinstance(each, Tensor)]


def _reads(node: Node, reads: dict[Node, dict[Node, int]], in_memory: set[Node]) -> dict[Node, int]:
    """The results in memory that a fused node is computed from."""
    found: dict[Node, int] = {}
    for argument in node.all_input_nodes:
        base = _base(argument)
        if base not in in_memory:
            direct = reads.get(base, {})
        else:
            used = min(nbytes(argument), nbytes(base))  # a view may be a part, or an expansion
            direct = {base: min(used, nbytes(node)) if _short(node) in LOOKUPS else used}
        for each, size in direct.items():
            found[each] = max(size, found.get(each, 0))
    return found


def _base(node: Node) -> Node:
    """What a node is a view of."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return node.target.is_view or _short(node) in VIEWS


def _is_written(node: Node) -> bool:
    """Whether it writes an argument, such as a buffer of the module."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_extern(node: Node) -> bool:
    target, short = node.target, _short(node)
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload) or target.namespace == "prims" or _is_view(node):
        return False
    if any(each.is_complex() for part in (node, *node.all_input_nodes) for each in _values(part)):
        return True  # inductor generates no code for complex numbers
    return target.namespace != "aten" or short in OWN_KERNELS or "scaled_dot_product" in short


def _short(node: Node) -> str:
    """`mm` of `aten.mm.default`."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""

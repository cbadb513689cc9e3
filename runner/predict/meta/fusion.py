"""Predicts inductor's fusion: which results in a compiled graph get memory, and which tensors each fused kernel reads."""

import operator
from typing import NamedTuple

from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from meshrunner.runner.ledger.memory_ledger import tensors_in
from meshrunner.runner.predict.record.operators import MATMULS, nbytes_of

UNFUSED = MATMULS | {
    *("embedding_dense_backward", "index_put", "index_put_", "_foreach_norm", "sort", "topk", "nonzero"),
    *("_local_scalar_dense", "empty", "bincount", "histc"),
}
"""aten operators that inductor does not fuse. Like attention, these operators run in torch's own kernels."""
REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var_mean", "prod", "any", "all", "logsumexp"),
    *("cumsum", "cumprod"),
}
"""Reductions, which end a fused kernel because later operators read the reduction's result from memory."""
LOOKUPS = {"index", "embedding", "gather", "index_select"}
"""Operators that look up rows of a table, and read only these rows, not the whole table."""
VIEWS = {"_unsafe_view", "reshape", "view", "alias", "detach", "wait_tensor"}
"""Operators that return views although their schemas do not declare a view."""
READS_TO_INLINE = 4
"""Maximum number of tensors that a computation may read for inductor to repeat it at each use of its result. If a computation
reads more, inductor stores a result that has several uses (`torch._inductor.config.realize_reads_threshold`)."""


class GraphMemory(NamedTuple):
    """Unfused operators and fused kernels of a graph. Other nodes are views or intermediate results of fused kernels."""

    unfused: set[Node]
    """Operators that run their own kernels, as they do without the compiler."""
    kernels: dict[Node, dict[Node, int]]
    """Fused kernels, keyed by the node of the result. Each value maps the tensors that the kernel reads to the bytes read."""


def memory_of(graph: Graph) -> GraphMemory:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    unfused = {node for node in calls if _is_unfused(node)}
    needed = {_base(each) for node in (*unfused, graph.output_node()) for each in node.all_input_nodes}
    in_memory = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")} | unfused
    reads: dict[Node, dict[Node, int]] = {}
    kernels: dict[Node, dict[Node, int]] = {}
    for node in calls:
        if node in unfused or _is_view(node):
            continue
        if node.target is operator.getitem:  # getitem selects one of several results
            source = node.all_input_nodes[0]
            if source in in_memory:
                in_memory.add(node)
            reads[node] = reads.get(source, {})
            continue
        read = reads[node] = _reads(node, reads, in_memory)
        realized = len(node.users) > 1 and len(read) > READS_TO_INLINE
        if node in needed or _name(node) in REDUCTIONS or mutates(node) or realized:
            in_memory.add(node)
            kernels[node] = _by_tensor(read)
    return GraphMemory(unfused, kernels)


def mutates(node: Node) -> bool:
    """Return whether an operator changes its first argument and returns it."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def selects(node: Node) -> bool:
    """Return whether a node returns a view of its first argument, or selects one of several results."""
    return node.target is operator.getitem or _is_view(node)


def nbytes(node: Node) -> int:
    return nbytes_of((node.meta.get("val"),))


def _reads(node: Node, reads: dict[Node, dict[Node, int]], in_memory: set[Node]) -> dict[Node, int]:
    """Return the bytes that a fused kernel must read from memory to compute `node`, keyed by tensor or view."""
    total: dict[Node, int] = {}
    for argument in node.all_input_nodes:
        base = _base(argument)
        if base not in in_memory:
            total |= reads.get(base, {})
        else:
            used = min(nbytes(argument), nbytes(base))  # a view may be a part or an expansion of its base
            total[argument] = min(used, nbytes(node)) if _name(node) in LOOKUPS else used
    return total


def _by_tensor(read: dict[Node, int]) -> dict[Node, int]:
    """Add up the bytes that a kernel reads through several views of a tensor, but count at most the whole tensor."""
    total: dict[Node, int] = {}
    for view, size in read.items():
        base = _base(view)
        total[base] = min(total.get(base, 0) + size, nbytes(base))
    return total


def _base(node: Node) -> Node:
    """Return the tensor that `node` views, directly or through other views, or `node` itself if it is not a view."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:  # selects one of the results of an operator such as `split`
        return _is_view(node.all_input_nodes[0])
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return node.target.is_view or _name(node) in VIEWS


def _is_unfused(node: Node) -> bool:
    target, name = node.target, _name(node)
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload) or target.namespace == "prims" or _is_view(node):
        return False
    if any(each.is_complex() for each in tensors_in(part.meta.get("val") for part in (node, *node.all_input_nodes))):
        return True  # inductor generates no code for complex numbers
    return target.namespace != "aten" or name in UNFUSED or "scaled_dot_product" in name


def _name(node: Node) -> str:
    """Return an operator's name without namespace and overload, such as `mm` for `aten.mm.default`."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""

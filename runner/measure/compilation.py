"""Facts about torch.compile in this process."""

from typing import Any

from torch._dynamo.utils import counters, get_compilation_metrics

from meshrunner.recipes.compile.base import ASYNC_TP_FUSED, Compile


def recompile_reasons() -> list[str]:
    """Return one text per recompilation so far, oldest first. Each text names the recompiled function and the failed guard."""
    return [f"{each.co_name}: {each.recompile_reason}" for each in get_compilation_metrics() if each.recompile_reason]


def compile_facts(compilation: Compile) -> dict[str, Any]:
    """Return facts about compilation for summary.json, such as `compile/graph_breaks`."""
    inductor = counters["inductor"]
    fused = {"compile/async_tp_fused": inductor[ASYNC_TP_FUSED]} if compilation.async_tensor_parallel else {}
    return fused | {
        "compile/graphs": counters["stats"]["unique_graphs"],
        "compile/graph_breaks": dict(counters["graph_break"]),
        "compile/recompiles": recompile_reasons(),
        # Compile times depend on whether Inductor's cache contained the forward and backward graphs.
        "compile/cache_hits": inductor["fxgraph_cache_hit"],
        "compile/cache_misses": inductor["fxgraph_cache_miss"],
    }

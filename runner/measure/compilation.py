"""Statistics of torch.compile in this process, from dynamo's own counters."""

from __future__ import annotations

from typing import Any


def compile_seconds() -> float:
    """Return the wall-clock seconds spent compiling forward and backward graphs so far."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def recompile_reasons() -> list[str]:
    """Return the reasons of all recompilations so far, in order: function and failed guard."""
    from torch._dynamo.utils import get_compilation_metrics

    return [f"{each.co_name}: {each.recompile_reason}" for each in get_compilation_metrics() if each.recompile_reason]


def compile_facts() -> dict[str, Any]:
    """Return the keys of summary.json about compilation."""
    from torch._dynamo.utils import counters

    return {
        "compile/graphs": counters["stats"]["unique_graphs"],
        "compile/graph_breaks": dict(counters["graph_break"]),
        "compile/recompiles": recompile_reasons(),
        # of inductor's graphs, forward and backward: a compile time means little without the state of the cache
        "compile/cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "compile/cache_misses": counters["inductor"]["fxgraph_cache_miss"],
    }

"""Statistics of torch.compile in this process, from dynamo's own counters."""

from __future__ import annotations

from typing import Any


def compile_seconds() -> float:
    """Wall seconds spent compiling so far, forward and backward graphs; 0 when nothing was compiled."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def recompile_reasons() -> list[str]:
    """Reasons of all recompilations so far, in order: function and failed guard."""
    from torch._dynamo.utils import get_compilation_metrics

    return [f"{each.co_name}: {each.recompile_reason}" for each in get_compilation_metrics() if each.recompile_reason]


def compile_facts() -> dict[str, Any]:
    """The keys of summary.json about compilation."""
    from torch._dynamo.utils import counters

    return {
        "compile/graphs": counters["stats"]["unique_graphs"],
        "compile/graph_breaks": dict(counters["graph_break"]),
        "compile/recompiles": recompile_reasons(),
        # inductor's graphs, forward and backward: a compile time means little without saying whether it was a cold one
        "compile/cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "compile/cache_misses": counters["inductor"]["fxgraph_cache_miss"],
    }

"""What torch.compile has done in this process, from its own books. Nothing here needs the device."""

from __future__ import annotations

from typing import Any


def compile_seconds() -> float:
    """Wall seconds spent compiling so far, forward and backward graphs; 0 when nothing was compiled."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def recompile_reasons() -> list[str]:
    """Why something that was compiled was compiled again, in order: the guard that failed."""
    from torch._dynamo.utils import get_compilation_metrics

    return [f"{each.co_name}: {each.recompile_reason}" for each in get_compilation_metrics() if each.recompile_reason]


def compile_facts() -> dict[str, Any]:
    """The keys of summary.json that tell what became of `compile`."""
    from torch._dynamo.utils import counters

    return {
        "compile/graphs": counters["stats"]["unique_graphs"],
        "compile/graph_breaks": dict(counters["graph_break"]),
        "compile/recompiles": recompile_reasons(),
    }

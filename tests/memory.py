"""What a CPU's allocator handed out while something ran, compiled code included."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocated(NamedTuple):
    """Bytes."""

    kept: int
    """Allocated and not freed."""
    peak: int
    """The most at one time."""


def allocated(run: Callable[[], Any]) -> Allocated:
    """The bytes that `run` allocates; what it returns is alive when they are counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = run()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    del result
    return Allocated(sum(sizes), max(accumulate(sizes), default=0))

"""profiler=none: every step runs as it is."""

from __future__ import annotations

from runner.profiler.base import Profiler


class NoProfiler(Profiler):
    """Nothing is looked into."""

"""Figures of every rank for the summary: means of times over the steps that count, and the peaks of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrunner.runner.figures import by_rank

TIMES = ("perf/step_time_s", "perf/data_time_s", "perf/cpu_time_s")
"""Keys of the values of a step that are added up, in their order."""


class ByRank:
    """Sums over steps, on rank 0; a read-out has gathered every rank's values anyway."""

    def __init__(self, world_size: int) -> None:
        self.times = torch.zeros(world_size, len(TIMES), dtype=torch.float64)
        self.steps = 0

    def add(self, seconds: Tensor) -> None:
        """
        Add a measured step; one that compiled does not count.

        Args:
            seconds: those of TIMES, and of compiling: [ranks, len(TIMES) + 1].
        """
        if not seconds[:, -1].any():
            self.times += seconds[:, :-1]
            self.steps += 1

    def summary(self, memory_keys: Sequence[str], memory: Tensor) -> dict[str, list[float]]:
        """
        Keys in summary.json -> a value of each rank, to four digits.

        Args:
            memory: what every rank measures of memory: [ranks, memory_keys].
        """
        found = {key: memory[:, i] for i, key in enumerate(memory_keys) if key.endswith("_gib")}
        if self.steps:
            found |= {key: self.times[:, i] / self.steps for i, key in enumerate(TIMES)}
        return {by_rank(key): [float(f"{each:.4g}") for each in values.tolist()] for key, values in found.items()}

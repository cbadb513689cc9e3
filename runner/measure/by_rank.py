"""Figures of each rank for the summary: mean times over the measured steps, and peaks of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrunner.runner.figures import by_rank, figure_of
from meshrunner.runner.measure.rows import RANK_KEYS


class ByRank:
    """Sums of each rank's times over steps, on rank 0, which has every rank's values after a read-out."""

    def __init__(self, world_size: int) -> None:
        self.sums = torch.zeros(world_size, len(RANK_KEYS), dtype=torch.float64)
        self.steps = 0

    def add(self, values: Tensor) -> None:
        """
        Add a measured step, unless a rank compiled in it.

        Args:
            values: every rank's values of RANK_KEYS: [ranks, RANK_KEYS].
        """
        if not values[:, RANK_KEYS.index("perf/compile_time_s")].any():
            self.sums += values
            self.steps += 1

    def summary(self, memory_keys: Sequence[str], memory: Tensor) -> dict[str, list[float]]:
        """
        Return the values of each rank for summary.json, to four digits.

        Args:
            memory: every rank's memory figures: [ranks, memory_keys].
        """
        found = {key: memory[:, i] for i, key in enumerate(memory_keys)}
        if self.steps:
            found |= {key: self.sums[:, i] / self.steps for i, key in enumerate(RANK_KEYS)}
        return {
            by_rank(key): [float(f"{each:.4g}") for each in values.tolist()]
            for key, values in found.items()
            if figure_of(key).by_rank
        }

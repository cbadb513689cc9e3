"""Turns the ranks' measurements of steps into rows of events.jsonl, and into every rank's figures in summary.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshrunner.runner.figures import FIGURES, by_rank, figure_of

RANK_KEYS = ("train/loss", "perf/step_time_s", "perf/data_time_s", "perf/cpu_time_s", "perf/compile_time_s")
"""Figures of a step that every rank measures, in the order of the gathered values."""
STATISTICS = {figure.key: figure.over_ranks for figure in FIGURES}
OVER_RANKS: dict[str, Callable[[Tensor], Tensor]] = {"mean": Tensor.mean, "max": Tensor.max, "sum": Tensor.sum}


@dataclass
class Step:
    """A launched step whose metrics have not been read yet."""

    number: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: int
    observed: Mapping[str, Tensor]
    data_time: float
    cpu_time: float
    compile_time: float
    checkpoint_time: float
    """Seconds spent saving a checkpoint before the step; 0 if none was saved."""
    profiled: bool
    begin: Any
    """Result of the device's `stamp` when the step began."""
    end: Any


@dataclass
class Rows:
    """Creates the rows of one attempt, in order."""

    attempt: int
    world_size: int
    device_type: str
    flops: int
    """FLOPs per token."""
    attention_flops: int
    """FLOPs that attention scores take per token. `flops` includes them."""
    peak: float | None
    """Peak FLOP/s of a device; None if unknown."""
    tokens: int
    """Tokens trained on so far."""

    def of(
        self, steps: list[Step], norms: list[float], ranks: Tensor, *, window: float, times: list[float]
    ) -> list[dict[str, Any]]:
        """
        Return the rows of the steps between two readings of metrics, without memory figures.

        The `window` seconds between the readings are divided among the steps in proportion to their step times, and
        WPS = tokens of the step / (the step's share of `window` x devices). So tokens = speed x time holds for the whole run.
        MFU = WPS x FLOPs per token / peak FLOP/s of the device. `ranks`: [ranks, steps, RANK_KEYS + observed figures].
        `times`: Unix time at which the device completed each step.
        """
        keys = (*RANK_KEYS, *steps[0].observed)
        merged = [merge_ranks(keys, ranks[:, i]) for i in range(len(steps))]
        stretch = window / sum(each["perf/step_time_s"] for each in merged)
        causal = self.flops - self.attention_flops / 2
        rows = []
        for step, grad_norm, each, finished in zip(steps, norms, merged, times, strict=True):
            self.tokens += step.tokens
            cpu = each["perf/cpu_time_s"] if self.device_type == "cpu" else 0.0
            wps = step.tokens / (each["perf/step_time_s"] * stretch * self.world_size)
            row = {
                "step": step.number,
                "attempt": self.attempt,
                "time": finished,
                **each,
                "train/grad_norm": grad_norm,
                "train/lr": step.lr,
                "train/tokens": self.tokens,
                "perf/wps": wps,
                "perf/mfu": 100 * wps * self.flops / self.peak if self.peak else None,
                "perf/mfu_causal": 100 * wps * causal / self.peak if self.peak else None,
                "perf/tflops": wps * self.flops / 1e12,
                "perf/tokens_per_cpu_s": step.tokens / cpu if cpu else None,
                "perf/checkpoint_time_s": step.checkpoint_time,
            }
            rows.append(row)
        return rows


def merge_ranks(keys: Sequence[str], ranks: Tensor) -> dict[str, float]:
    """Merge values [ranks, keys] over ranks: mean, max or sum, as in `Figure.over_ranks`. A user's own figures are averaged."""
    return {key: OVER_RANKS[STATISTICS.get(key) or "mean"](ranks[:, i]).item() for i, key in enumerate(keys)}


class ByRank:
    """Sums of each rank's times over the measured steps. Only rank 0 computes these sums."""

    def __init__(self, world_size: int) -> None:
        self.sums = torch.zeros(world_size, len(RANK_KEYS), dtype=torch.float64)
        self.steps = 0

    def add(self, values: Tensor) -> None:
        """Add the values of a measured step, [ranks, RANK_KEYS], unless a rank compiled during the step."""
        if not values[:, RANK_KEYS.index("perf/compile_time_s")].any():
            self.sums += values
            self.steps += 1

    def summary(self, memory_keys: Sequence[str], memory: Tensor) -> dict[str, list[float]]:
        """Return each rank's figures for summary.json with four significant digits. `memory`: [ranks, memory_keys]."""
        found = {key: memory[:, i] for i, key in enumerate(memory_keys)}
        if self.steps:
            found |= {key: self.sums[:, i] / self.steps for i, key in enumerate(RANK_KEYS)}
        return {
            by_rank(key): [float(f"{each:.4g}") for each in values.tolist()]
            for key, values in found.items()
            if figure_of(key).by_rank
        }

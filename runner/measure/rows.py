"""Computes a run's figures, such as `perf/wps`: one row of figures per step, and one value per rank for summary.json."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshrunner.recipes.model.base import Flops
from meshrunner.runner.figures import FIGURES, by_rank, figure_of
from meshrunner.runner.process.worker_context import WorkerContext

RANK_KEYS = ("train/loss", "perf/step_time_s", "perf/data_time_s", "perf/cpu_time_s", "perf/compile_time_s")
"""Keys of the figures that every rank measures in every step. Tensors store the figures in the order of these keys."""
STATISTICS = {figure.key: figure.over_ranks for figure in FIGURES}
OVER_RANKS: dict[str, Callable[[Tensor], Tensor]] = {"mean": Tensor.mean, "max": Tensor.max, "sum": Tensor.sum}


@dataclass
class Step:
    """A step whose work is issued to the device, but whose loss and other metrics are not copied to the host yet."""

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
    """Time stamp from `HostDevice.stamp` at the beginning of the step."""
    end: Any


@dataclass
class Rows:
    """Converts the measurements of an attempt to rows, one row per step. An attempt is one start or resumption of a run."""

    context: WorkerContext
    flops: Flops
    peak: float | None
    """Peak FLOP/s of a device; None if unknown."""
    tokens: int
    """Number of training tokens in all steps up to the last row, including the steps of earlier attempts."""
    beyond_peak: bool = False
    """Whether a step exceeded `peak`, for example because `peak` was measured on a busy CPU. MFU is unknown in such a step."""

    def of(
        self, steps: list[Step], norms: list[float], ranks: Tensor, *, window: float, times: list[float], joules: float
    ) -> list[dict[str, Any]]:
        """Return one row per step for the steps between two readings of metrics. The rows contain no memory figures.

        `window`: seconds between two readings of metrics. Each step gets a share of `window` in proportion to its step time.
        WPS = tokens of the step / (share of `window` x devices). `window` includes the time for reading metrics.
        MFU = WPS x FLOPs per token / peak FLOP/s of the device. `ranks` has the shape [ranks, steps, RANK_KEYS + values of
        `Network.observe`]. `times` holds the Unix time at which the device completed each step. `joules`: energy that all devices
        used in `window`; NaN if unknown.
        """
        keys = (*RANK_KEYS, *steps[0].observed)
        merged = [merge_ranks(keys, ranks[:, i]) for i in range(len(steps))]
        stretch = window / sum(each["perf/step_time_s"] for each in merged)
        joules_per_token = joules / sum(step.tokens for step in steps)
        flops, causal = self.flops.total, self.flops.total - self.flops.attention / 2
        rows = []
        for step, grad_norm, each, finished in zip(steps, norms, merged, times, strict=True):
            self.tokens += step.tokens
            cpu = each["perf/cpu_time_s"] if self.context.device_type == "cpu" else 0.0
            wps = step.tokens / (each["perf/step_time_s"] * stretch * self.context.world_size)
            row = {
                "step": step.number,
                "attempt": self.context.attempt,
                "time": finished,
                **each,
                "train/grad_norm": grad_norm,
                "train/lr": step.lr,
                "train/tokens": self.tokens,
                "perf/wps": wps,
                "perf/mfu": 100 * wps * flops / self.peak if self.peak else None,
                "perf/mfu_causal": 100 * wps * causal / self.peak if self.peak else None,
                "perf/tflops": wps * flops / 1e12,
                "perf/tokens_per_cpu_s": step.tokens / cpu if cpu else None,
                "perf/joules_per_token": joules_per_token,
                "perf/checkpoint_time_s": step.checkpoint_time,
            }
            if (row["perf/mfu"] or 0) > 100:
                self.beyond_peak = True
                row |= {"perf/mfu": None, "perf/mfu_causal": None}
            rows.append(row)
        return rows


def of_emulated(row: dict[str, Any], communication_s: float | None) -> dict[str, Any]:
    """Turn a measured row into the row of an emulated rank. The measured step time excludes communication, so add the seconds
    spent waiting for communication. If `communication_s` is None, step time and speed become None. Figures without meaning for
    an emulated rank, such as the loss, also become None."""
    compute = row["perf/step_time_s"]
    ratio = None if communication_s is None else compute / (compute + communication_s)
    meaningless = {key for key in row if key.startswith(("train/", "experts/"))} - {"train/lr", "train/tokens"}
    return {
        **row,
        **dict.fromkeys((*meaningless, "perf/tokens_per_cpu_s", "perf/joules_per_token")),
        "perf/compute_step_time_s": compute,
        "perf/communication_s": communication_s,
        "perf/step_time_s": ratio and compute / ratio,
        **{
            key: ratio and row[key] and row[key] * ratio
            for key in ("perf/wps", "perf/mfu", "perf/mfu_causal", "perf/tflops")
        },
    }


def merge_ranks(keys: Sequence[str], ranks: Tensor) -> dict[str, float]:
    """Reduce `ranks`, of shape [ranks, keys], to one value per key: the statistic `Figure.over_ranks`, or the mean if unset."""
    return {key: OVER_RANKS[STATISTICS.get(key) or "mean"](ranks[:, i]).item() for i, key in enumerate(keys)}


def stop_if_not_finite(steps: list[Step], rank_losses: Tensor, norms: list[float]) -> None:
    """Raise FloatingPointError if a loss or gradient norm is not finite. All ranks check the same values, so all raise it."""
    for i, step in enumerate(steps):
        what = f"gradient norm is {norms[i]} though the loss is finite"
        if wrong := (~rank_losses[:, i].isfinite()).nonzero().flatten().tolist():
            what = f"loss is {rank_losses[wrong[0], i].item()} on rank {wrong[0]}"
        if wrong or not math.isfinite(norms[i]):
            raise FloatingPointError(
                f"step {step.number}: the {what}; this step's update was skipped and the run stops"
            )


class ByRank:
    """Each rank's loss and times (RANK_KEYS), summed over the steps passed to `add`. Only rank 0 computes these sums."""

    def __init__(self, world_size: int) -> None:
        self.sums = torch.zeros(world_size, len(RANK_KEYS), dtype=torch.float64)
        self.steps = 0

    def add(self, values: Tensor) -> None:
        """Add the values of a measured step, of shape [ranks, RANK_KEYS]. Skip the step if any rank compiled code during it."""
        if not values[:, RANK_KEYS.index("perf/compile_time_s")].any():
            self.sums += values
            self.steps += 1

    def summary(self, memory_keys: Sequence[str], memory: Tensor) -> dict[str, list[float]]:
        """Return lists with one value per rank, keyed as in summary.json. `memory` has the shape [ranks, memory_keys]."""
        found = {key: memory[:, i] for i, key in enumerate(memory_keys)}
        if self.steps:
            found |= {key: self.sums[:, i] / self.steps for i, key in enumerate(RANK_KEYS)}
        return {
            by_rank(key): [float(f"{each:.4g}") for each in values.tolist()]
            for key, values in found.items()
            if figure_of(key).by_rank
        }

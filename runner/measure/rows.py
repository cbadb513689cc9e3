"""Turns the ranks' measurements of steps into rows of events.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshrunner.runner.figures import FIGURES

RANK_KEYS = ("train/loss", "perf/step_time_s", "perf/data_time_s", "perf/cpu_time_s", "perf/compile_time_s")
"""Figures of a step that every rank measures, in the order of the gathered values."""
STATISTICS = {figure.key: figure.over_ranks for figure in FIGURES}
OVER_RANKS: dict[str, Callable[[Tensor], Tensor]] = {"mean": Tensor.mean, "max": Tensor.max, "sum": Tensor.sum}


@dataclass
class Step:
    """A completed step that was not read out yet."""

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
    """Seconds of the checkpoint saved before the step; 0 if none was saved."""
    profiled: bool
    begin: Any
    """Time stamp of the device's clock."""
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
    """The part of `flops` in attention scores."""
    peak: float | None
    """Peak FLOP/s of a device; None if unknown."""
    tokens: int
    """Tokens trained on so far."""

    def of(
        self, steps: list[Step], norms: list[float], ranks: Tensor, *, window: float, times: list[float]
    ) -> list[dict[str, Any]]:
        """
        Return the rows of the steps between two read-outs, without memory figures.

        The whole time between two read-outs is divided among its steps in proportion to their step times, so that
        tokens = speed x time holds for the run: WPS = tokens of the step / (its part of that time x devices).
        MFU = WPS x FLOPs per token / peak FLOP/s of the device.

        Args:
            ranks: every rank's values of RANK_KEYS, then of the observed figures: [ranks, steps, RANK_KEYS + observed].
            window: seconds between the two read-outs.
            times: unix time at which the device completed each step.
        """
        keys = (*RANK_KEYS, *(steps[0].observed if steps else ()))
        merged = [merge_ranks(keys, ranks[:, i]) for i in range(len(steps))]
        stretch = window / sum(each["perf/step_time_s"] for each in merged)
        return [self._row(*each, stretch) for each in zip(steps, norms, merged, times, strict=True)]

    def _row(
        self, step: Step, grad_norm: float, merged: dict[str, float], finished: float, stretch: float
    ) -> dict[str, Any]:
        cpu = merged["perf/cpu_time_s"]
        self.tokens += step.tokens
        wps = step.tokens / (merged["perf/step_time_s"] * stretch * self.world_size)
        causal = self.flops - self.attention_flops / 2
        return {
            "step": step.number,
            "attempt": self.attempt,
            "time": finished,
            "train/loss": merged["train/loss"],
            "train/grad_norm": grad_norm,
            "train/lr": step.lr,
            "train/tokens": self.tokens,
            "perf/wps": wps,
            "perf/mfu": 100 * wps * self.flops / self.peak if self.peak else None,
            "perf/mfu_causal": 100 * wps * causal / self.peak if self.peak else None,
            "perf/tflops": wps * self.flops / 1e12,
            "perf/step_time_s": merged["perf/step_time_s"],
            "perf/data_time_s": merged["perf/data_time_s"],
            "perf/cpu_time_s": cpu,
            "perf/tokens_per_cpu_s": step.tokens / cpu if cpu and self.device_type == "cpu" else None,
            "perf/compile_time_s": merged["perf/compile_time_s"],
            "perf/checkpoint_time_s": step.checkpoint_time,
            **{key: merged[key] for key in step.observed},
        }


def merge_ranks(keys: Sequence[str], ranks: Tensor) -> dict[str, float]:
    """
    Merge every rank's values as `Figure.over_ranks` says; figures that only a user's own model has are averaged.

    Args:
        ranks: values of the keys: [ranks, keys].
    """
    return {key: OVER_RANKS[STATISTICS.get(key, "mean")](ranks[:, i]).item() for i, key in enumerate(keys)}

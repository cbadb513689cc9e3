"""Steps -> rows of events.jsonl: what the ranks measured of a step becomes its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

RANK_VALUES = 5
"""Number of values per rank and step that `Rows.of` takes, besides those observed."""


@dataclass
class Step:
    """A completed step, before the read-out."""

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
    """Seconds of the save before it."""
    profiled: bool
    begin: Any
    """Stamp of the device's clock."""
    end: Any


@dataclass
class Rows:
    """The rows of one attempt, in order."""

    attempt: int
    world_size: int
    device_type: str
    flops: int
    """Per token."""
    attention_flops: int
    peak: float | None
    """FLOP/s of a device; None where it is not known."""
    tokens: int
    """All that were trained on so far."""

    def of(
        self, steps: list[Step], norms: list[float], ranks: Tensor, *, window: float, times: list[float]
    ) -> list[dict[str, Any]]:
        """
        The rows of the steps between two read-outs, but for memory.

        All the time between two read-outs counts, reading out included, so that tokens are speed x time:
        WPS = tokens of the step / (its share of that time x devices); the shares are as the seconds of the steps.
        MFU = WPS x FLOPs per token / peak FLOP/s of the device.

        Args:
            ranks: loss, seconds, seconds of waiting for data, CPU seconds and seconds of compiling of every rank, then what
                else was observed: [ranks, steps, RANK_VALUES + observed].
            window: seconds from the end of the steps of the last read-out to the end of these.
            times: unix time at which the device had done each step.
        """
        seconds = ranks[:, :, 1].amax(0).tolist()  # the slowest rank's
        stretch = window / sum(seconds)
        return [
            self._row(step, norms[i], ranks[:, i], times[i], seconds[i], seconds[i] * stretch)
            for i, step in enumerate(steps)
        ]

    def _row(
        self, step: Step, grad_norm: float, ranks: Tensor, finished: float, seconds: float, counted: float
    ) -> dict[str, Any]:
        cpu = ranks[:, 3].sum().item()
        self.tokens += step.tokens
        wps = step.tokens / (counted * self.world_size)
        causal = self.flops - self.attention_flops / 2
        return {
            "step": step.number,
            "attempt": self.attempt,
            "time": finished,
            "train/loss": ranks[:, 0].mean().item(),
            "train/grad_norm": grad_norm,
            "train/lr": step.lr,
            "train/tokens": self.tokens,
            "perf/wps": wps,
            "perf/mfu": 100 * wps * self.flops / self.peak if self.peak else None,
            "perf/mfu_causal": 100 * wps * causal / self.peak if self.peak else None,
            "perf/tflops": wps * self.flops / 1e12,
            "perf/step_time_s": seconds,
            "perf/data_time_s": ranks[:, 2].max().item(),
            "perf/cpu_time_s": cpu,
            "perf/tokens_per_cpu_s": step.tokens / cpu if cpu and self.device_type == "cpu" else None,
            "perf/compile_time_s": ranks[:, 4].max().item(),
            "perf/checkpoint_time_s": step.checkpoint_time,
        } | dict(zip(step.observed, ranks[:, RANK_VALUES:].mean(0).tolist(), strict=True))

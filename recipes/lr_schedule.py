"""The `lr_schedule` group: the factor on `optimizer.lr`, a pure function of the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option, whole

Steps = Annotated[int, whole(at_least=0)]


class LRSchedule(Option):
    """A learning-rate schedule."""

    kinds: ClassVar[dict[str, str]] = {
        "constant": "meshrunner.recipes.lr_schedule:Constant",
        "warmup_linear": "meshrunner.recipes.lr_schedule:WarmupLinear",
        "warmup_cosine": "meshrunner.recipes.lr_schedule:WarmupCosine",
        "wsd": "meshrunner.recipes.lr_schedule:WSD",
    }

    @abstractmethod
    def factor(self, step: int) -> float:
        """The factor at a step, which counts from 1."""


def rise(step: int, warmup_steps: int) -> float:
    """The factor of a linear warm-up: 1 from step `warmup_steps` on."""
    return step / warmup_steps if step < warmup_steps else 1.0


class Constant(LRSchedule):
    """Rises linearly for `warmup_steps`, then stays the same."""

    warmup_steps: Steps = 0  # configurations on disk that are older than the key had none
    """Steps of linear rise; the last of them is the first at the full rate."""

    def factor(self, step: int) -> float:
        return rise(step, self.warmup_steps)


class Warmup(LRSchedule):
    """Rises linearly for `warmup_steps`, then falls as the subclass says to `final` at `total_steps`, and stays there."""

    total_steps: Count
    """Length of the schedule in steps. It does not follow `steps` of a run that is resumed and made longer."""
    warmup_steps: Steps
    """Steps of linear rise; the last of them is the first at the full rate."""
    final: float = Field(ge=0, le=1)
    """Factor at the end."""

    @abstractmethod
    def fall(self, progress: float) -> float:
        """From 1 to 0 while `progress` goes from 0 (end of the warm-up) to 1 (`total_steps`)."""

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return rise(step, self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.final + (1 - self.final) * self.fall(progress)


class WarmupLinear(Warmup):
    """Linear rise, linear fall."""

    def fall(self, progress: float) -> float:
        return 1 - progress


class WarmupCosine(Warmup):
    """Linear rise, half a cosine down (Loshchilov and Hutter 2017)."""

    def fall(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


class WSD(Warmup):
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM): full rate until the last `decay` part, then a linear fall."""

    decay: float = Field(gt=0, le=1)
    """Part of the steps after the warm-up that the fall takes."""

    def fall(self, progress: float) -> float:
        return min(1.0, (1 - progress) / self.decay)

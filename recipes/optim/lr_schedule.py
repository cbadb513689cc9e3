"""The `lr_schedule` group: a factor that multiplies `optimizer.lr` and depends only on the step."""

import math
from abc import abstractmethod
from typing import Annotated, ClassVar

from pydantic import Field

from meshrunner.recipes.option import Affects, Count, Option, whole

Steps = Annotated[int, whole(at_least=0)]
SHIPPED_WARMUP = 10
"""Value of `warmup_steps` in conf/lr_schedule/constant.yaml."""


class LRSchedule(Option):
    """A learning-rate schedule."""

    kinds: ClassVar[dict[str, str]] = {
        "constant": "meshrunner.recipes.optim.lr_schedule:Constant",
        "warmup_linear": "meshrunner.recipes.optim.lr_schedule:WarmupLinear",
        "warmup_cosine": "meshrunner.recipes.optim.lr_schedule:WarmupCosine",
        "wsd": "meshrunner.recipes.optim.lr_schedule:WSD",
    }

    affects: ClassVar[Affects] = Affects.RESULT

    @abstractmethod
    def factor(self, step: int) -> float:
        """Return the factor that multiplies the learning rate at a step. Steps are counted from 1."""

    def remarks(self, steps: int) -> list[str]:
        """Return remarks on likely mistakes in a run of `steps` steps, such as a warm-up that lasts for all steps."""
        return []


class Constant(LRSchedule):
    """Linear warm-up, then a constant rate."""

    warmup_steps: Steps = 0  # configurations that predate this key have no warm-up
    """Steps of linear warm-up. Step `warmup_steps` is the first step at the full rate."""

    def factor(self, step: int) -> float:
        return step / self.warmup_steps if step < self.warmup_steps else 1.0

    def remarks(self, steps: int) -> list[str]:
        # Do not remark on the shipped warm-up, because trial runs of a few steps are common.
        if self.warmup_steps < steps or self.warmup_steps == SHIPPED_WARMUP:
            return []
        return [
            f"lr_schedule.warmup_steps({self.warmup_steps}) is not below steps({steps}): the learning rate only rises"
        ]


class Warmup(LRSchedule):
    """Linear warm-up, decay to `final` at `total_steps`, then a constant rate. Subclasses define the shape of the decay."""

    total_steps: Count
    """Length of the schedule in steps. A run that is resumed with more `steps` keeps the same schedule."""
    warmup_steps: Steps
    """Steps of linear warm-up. Step `warmup_steps` is the first step at the full rate."""
    final: float = Field(ge=0, le=1)
    """Fraction of the full learning rate that is used from step `total_steps` on."""

    @abstractmethod
    def decay_factor(self, progress: float) -> float:
        """Return a factor that falls from 1 to 0 as `progress` goes from 0 (end of the warm-up) to 1 (`total_steps`)."""

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return step / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.final + (1 - self.final) * self.decay_factor(progress)

    def remarks(self, steps: int) -> list[str]:
        for key, length in (("total_steps", self.total_steps), ("steps", steps)):
            if self.warmup_steps >= length:
                return [f"lr_schedule.warmup_steps({self.warmup_steps}) is not below {key}({length}): no decay follows"]
        return []


class WarmupLinear(Warmup):
    """Linear warm-up, linear decay."""

    def decay_factor(self, progress: float) -> float:
        return 1 - progress


class WarmupCosine(Warmup):
    """Linear warm-up, half-cosine decay (Loshchilov and Hutter 2017)."""

    def decay_factor(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


class WSD(Warmup):
    """Linear warm-up, then the full rate, then a linear decay (warm-up, stable, decay: Hu et al. 2024, MiniCPM)."""

    decay: float = Field(gt=0, le=1)
    """Length of the decay as a fraction of the steps after warm-up."""

    def decay_factor(self, progress: float) -> float:
        return min(1.0, (1 - progress) / self.decay)

"""An option of your own: a learning-rate schedule, named by `kind: examples.sawtooth:Sawtooth`. Nothing has to be registered."""

from __future__ import annotations

from meshrunner.recipes.optim.lr_schedule import LRSchedule
from meshrunner.recipes.option import Count


class Sawtooth(LRSchedule):
    """A rate that falls linearly over `period` steps, then returns to its peak and falls again."""

    period: Count
    """Steps between two peaks."""

    def factor(self, step: int) -> float:
        return 1 - (step - 1) % self.period / self.period

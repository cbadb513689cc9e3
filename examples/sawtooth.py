"""An option of one's own: a learning-rate schedule. `kind: examples.sawtooth:Sawtooth` names it, nothing registers it."""

from __future__ import annotations

from meshrunner.recipes.optim.lr_schedule import LRSchedule
from meshrunner.recipes.option import Count


class Sawtooth(LRSchedule):
    """Falls linearly over `period` steps, then begins again."""

    period: Count
    """Steps between two peaks."""

    def factor(self, step: int) -> float:
        return 1 - (step - 1) % self.period / self.period

"""Skip optimizer steps whose loss or gradient norm is far above those of recent steps, without waiting for the device."""

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 128
"""Steps in the history."""
ENOUGH = 16
"""Steps that the history needs before a step can be skipped. A standard deviation of 16 values has a relative error of 18%."""


class Outliers:
    """The losses and gradient norms of the last LENGTH optimizer steps that were not skipped, equal on all ranks."""

    def __init__(self, deviations: float, device: torch.device) -> None:
        """deviations: skip a step that is more than this number of standard deviations above the mean."""
        self.deviations = deviations
        self.history = torch.zeros(LENGTH, 2, device=device)
        """Loss and gradient norm of each step. A new step replaces the oldest one."""
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """Number of steps that were ever added to the history."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint contains. Loading a checkpoint overwrites them in place."""
        return {"history": self.history, "count": self.count}

    @torch.no_grad()
    def is_outlier(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return whether to skip a step, 0-d, bool. Add the step to the history if it is finite and not skipped. loss: this
        rank's mean loss."""
        step = torch.stack((loss, grad_norm))
        dist.all_reduce(step)
        step /= dist.get_world_size()  # all ranks average the same number of tokens, and have the same norm
        numbers = torch.arange(LENGTH, device=step.device)
        known = (numbers < self.count).unsqueeze(-1)
        length = self.count.clamp(1, LENGTH)
        mean = self.history.sum(0) / length  # unknown values are 0
        variance = torch.where(known, (self.history - mean).square(), 0.0).sum(0) / length
        above = (step > mean + self.deviations * variance.sqrt()).any()
        outlier = above & (self.count >= ENOUGH)
        added = step.isfinite().all() & ~outlier
        replaced = (numbers == self.count % LENGTH) & added
        self.history.copy_(torch.where(replaced.unsqueeze(-1), step, self.history))
        self.count += added
        return outlier

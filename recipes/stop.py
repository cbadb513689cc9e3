"""Stopping early, all ranks after the same step: a preempted run saves itself and ends before it is killed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class StopAgreement:
    """
    Whether any rank is requested to stop, agreed on without waiting.

    After every step the ranks reduce a flag in the background, over gloo whatever the devices are, and read the result
    of the step before: by then it is there.

    Args:
        requested: whether this rank is requested to stop; called after every step.
    """

    def __init__(self, requested: Callable[[], bool]) -> None:
        self.requested = requested
        self.group = dist.new_group(backend="gloo")
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.reduced: dist.Work | None = None

    def agreed(self) -> bool:
        """Called by every rank after every step; True on all of them after the same one."""
        if self.reduced is not None:
            self.reduced.wait()
            if self.flag.item():
                return True
        self.flag.fill_(self.requested())
        self.reduced = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return False

"""Early stopping on all ranks after the same step, so a preempted run can save a checkpoint before it is killed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class StopAgreement:
    """
    A non-blocking agreement among ranks on whether any of them was requested to stop.

    After every step the ranks all-reduce a flag asynchronously, over gloo on any device. They read the result of the previous
    step, which is complete by then.

    Args:
        requested: whether this rank was requested to stop; called after every step.
    """

    def __init__(self, requested: Callable[[], bool]) -> None:
        self.requested = requested
        self.group = dist.new_group(backend="gloo")
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.reduced: dist.Work | None = None

    def agreed(self) -> bool:
        """Whether to stop now. Every rank calls this after every step; it becomes True on all ranks after the same step."""
        if self.reduced is not None:
            self.reduced.wait()
            if self.flag.item():
                return True
        self.flag.fill_(self.requested())
        self.reduced = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return False

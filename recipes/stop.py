"""Stop all ranks after the same step, so that a preempted run can save a checkpoint before it is killed."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class StopAgreement:
    """An agreement of all ranks to stop after the same step if `requested()` is true on any rank. After every step, a rank reads
    the result of the all-reduce that it started one step earlier, usually without waiting, and starts the next one, over gloo.
    All ranks therefore stop one step after the request."""

    def __init__(self, requested: Callable[[], bool]) -> None:
        self.requested = requested
        self.group = dist.new_group(backend="gloo")
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.reduced: dist.Work | None = None

    def agreed(self) -> bool:
        """Return whether to stop now. Every rank must call this after every step. All ranks get True after the same step."""
        if self.reduced is not None:
            self.reduced.wait()
            if self.flag.item():
                return True
        self.flag.fill_(self.requested())
        self.reduced = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return False

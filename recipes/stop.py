"""Stop all ranks after the same step, so that a preempted run can save a checkpoint before it is killed."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist


def stop_agreement(requested: Callable[[], bool]) -> Iterator[bool]:
    """Yield a bool per step: whether to stop. If `requested()` is true on any rank, all ranks get True one step later. After
    every step, a rank reads the result of the previous step's all-reduce, usually without waiting, and starts another."""
    group = dist.new_group(backend="fake" if dist.get_backend() == "fake" else "gloo")
    flag = torch.zeros(1, dtype=torch.int32)
    while not flag.item():
        flag.fill_(requested())
        reduced = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True)
        yield False
        reduced.wait()
    yield True

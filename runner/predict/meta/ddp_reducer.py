"""What stands in for the C++ of DDP, of which nothing can be replaced by itself."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, GradBucket, _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel

from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.device_streams import DeviceModule
from meshrunner.runner.predict.record.recorder import Recorder


class _Except:
    """Something of DDP's in C++, of which a few methods do something else."""

    def __init__(self, own: Any, **methods: Any) -> None:
        self.__dict__.update(methods, _own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_own"], name)


class _Reductions:
    """What a replica does with its buckets, as in C++: divided first, then added up, on NCCL's stream while backward goes on."""

    def __init__(self, recorder: Recorder) -> None:
        self.handle = DeviceModule(recorder.device)
        self.stream = self.handle.Stream()

    def reduce(self, group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """A comm hook; when the last bucket has been issued, backward has ended, and computing waits for them all."""
        buffer, computing = bucket.buffer(), self.handle.current_stream()
        buffer.div_(group.size())
        self.stream.wait_stream(computing)
        with self.handle.stream(self.stream):
            dist.all_reduce(buffer, group=group)
        if bucket.is_last():
            computing.wait_stream(self.stream)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done


def ddp_reduces(torch_own: Replacements, recorder: Recorder) -> None:
    """
    DDP reduces in C++, where a fake process group is refused: a hook in Python reduces the same buckets.

    After the first step it would put its buckets together anew and share their order as data: here they are so from the
    beginning. And it would time its steps with a timer that meta does not have.
    """
    before, helped = DistributedDataParallel.__init__, DistributedDataParallel._ddp_init_helper

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        reductions = _Reductions(recorder)
        self.register_comm_hook(self.process_group, lambda group, bucket: reductions.reduce(group, bucket))
        self.reducer = _Except(self.reducer, _rebuild_buckets=lambda: False)  # type: ignore[assignment]
        self.logger = _Except(self.logger, set_runtime_stats_and_log=lambda: None)

    def help_init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        cap = self.bucket_bytes_cap
        first = _DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else cap

        def assigned(
            parameters: list[Tensor], limits: list[int], sparse: list[bool]
        ) -> tuple[list[list[int]], list[int]]:
            if limits != [sys.maxsize]:  # they stay as they are
                return _compute_bucket_assignment_by_size(parameters, limits, sparse)
            # In the order that gradients come in. DDP reverses what it is given.
            buckets, sizes = _compute_bucket_assignment_by_size(parameters[::-1], [first, cap], sparse[::-1])
            last = len(parameters) - 1
            return [[last - number for number in bucket] for bucket in reversed(buckets)], sizes[::-1]

        with Replacements() as own:
            own.replace(dist, "_compute_bucket_assignment_by_size", assigned)
            helped(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    torch_own.replace(DistributedDataParallel, "__init__", init)
    torch_own.replace(DistributedDataParallel, "_ddp_init_helper", help_init)

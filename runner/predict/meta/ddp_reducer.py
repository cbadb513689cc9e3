"""Replacements for the C++ reducer of DDP, which can only be replaced as a whole."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, GradBucket, _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel

from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.device_streams import TracedDevice, TracedStream
from meshrunner.runner.predict.record.recorder import Recorder


class _Overridden:
    """A C++ object with some of its methods replaced."""

    def __init__(self, wrapped: Any, **methods: Any) -> None:
        self.__dict__.update(methods, _wrapped=wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)


def _reduce(device: TracedDevice, stream: TracedStream, group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket as the C++ does: divide, then sum on NCCL's stream. After the last one, compute waits for all of them."""
    buffer, computing = bucket.buffer(), device.current_stream()
    buffer.div_(group.size())
    stream.wait_stream(computing)
    with device.stream(stream):
        dist.all_reduce(buffer, group=group)
    if bucket.is_last():
        computing.wait_stream(stream)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def ddp_reducer(in_torch: Replacements, recorder: Recorder) -> None:
    """
    Reduce DDP's buckets by a hook in Python: the C++ refuses a fake process group.

    After the first step DDP would rebuild its buckets and broadcast their order as data; here they have that order from the
    beginning. Its timer of steps does not exist on meta.
    """
    init, init_helper = DistributedDataParallel.__init__, DistributedDataParallel._ddp_init_helper

    def traced_init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        device, stream = recorder.device, recorder.device.Stream()
        self.register_comm_hook(self.process_group, lambda group, bucket: _reduce(device, stream, group, bucket))
        self.reducer = _Overridden(self.reducer, _rebuild_buckets=lambda: False)  # type: ignore[assignment]
        self.logger = _Overridden(self.logger, set_runtime_stats_and_log=lambda: None)

    def traced_init_helper(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        cap = self.bucket_bytes_cap
        first = _DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else cap

        def rebuilt(
            parameters: list[Tensor], limits: list[int], sparse: list[bool]
        ) -> tuple[list[list[int]], list[int]]:
            if limits != [sys.maxsize]:  # DDP keeps these buckets
                return _compute_bucket_assignment_by_size(parameters, limits, sparse)
            # In the order in which gradients arrive. DDP reverses the result.
            buckets, sizes = _compute_bucket_assignment_by_size(parameters[::-1], [first, cap], sparse[::-1])
            last = len(parameters) - 1
            return [[last - number for number in bucket] for bucket in reversed(buckets)], sizes[::-1]

        with Replacements() as in_dist:
            in_dist.replace(dist, "_compute_bucket_assignment_by_size", rebuilt)
            init_helper(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    in_torch.replace(DistributedDataParallel, "__init__", traced_init)
    in_torch.replace(DistributedDataParallel, "_ddp_init_helper", traced_init_helper)

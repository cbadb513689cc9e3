"""Pools that hand out communication buffers (all-gather outputs, reduce-scatter inputs) at fixed addresses to FSDP2's units."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.multiprocessing.reductions import StorageWeakRef

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.parallelism.buffers import placement
from meshrunner.recipes.parallelism.buffers.placement import Bucket, InFlight, Plan, Schedule

PATIENCE_S = 5.0
"""Maximum seconds to wait until a buffer is free. gloo's threads use a buffer for a moment after its collective has ended."""
INSTEAD = "use parallelism.buffers=dynamic"


def empty_cache(device: torch.device) -> None:
    """Free the memory that torch has cached on a GPU, such as the buffers of the first step, which are never used again."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Use(NamedTuple):
    """Address range [begin, end) of a buffer that the pool has handed to a unit."""

    unit: str
    begin: int
    end: int
    released: Callable[[], bool]
    """Function that returns true if neither a tensor nor a thread of torch still refers to the buffer."""


class BufferPool:
    """A pool of one kind of buffer for all units on one device: either all-gather outputs or reduce-scatter inputs.

    In the first optimizer step, torch's allocator provides every buffer, and the pool records the requests. From the second
    step on, each unit has a fixed address range in one large allocation, the arena. Before the pool hands out a range, it
    waits until no buffer in use overlaps the range. After PATIENCE_S, it raises an error, so a wrong plan cannot corrupt data.

    A released buffer can be reused while GPU kernels still read it, because the stream that fills the buffer waits for these
    kernels.
    """

    def __init__(self, place: Callable[[Schedule], Plan], in_flight: InFlight) -> None:
        self._place, self._in_flight = place, in_flight
        self.offsets: dict[str, int] = {}
        """Offset of each unit's buffer in the arena, in bytes."""
        self._requests: list[tuple[bool, str]] = []
        """The requests of the first step, as pairs: (whether backward made the request, unit)."""
        self._buckets: dict[str, Bucket] = {}
        """The largest buffer that each unit has requested."""
        self._device: torch.device | None = None
        self._arena: Tensor | None = None
        self._uses: list[Use] = []

    def take(self, unit: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer of shape [elements] for a unit. Raise ConfigError if no planned buffer fits."""
        bucket = Bucket(str(dtype), elements * dtype.itemsize)
        if self._arena is None:
            self._wait_until_free(unit)
            in_backward = torch._C._current_graph_task_id() != -1  # FSDP2 detects backward in this way
            self._requests.append((in_backward, unit))
            self._buckets[unit] = max(self._buckets.get(unit, bucket), bucket, key=lambda each: each.nbytes)
            self._device = device
            buffer = torch.empty(elements, dtype=dtype, device=device)
        else:
            self._check(unit, bucket)
            part = self._arena[self.offsets[unit] :][: bucket.nbytes]
            if part.is_meta:  # meta tensors have no addresses to check
                return part.view(dtype)
            begin = part.data_ptr()
            self._wait_until_free(unit, begin, begin + bucket.nbytes)
            # Not a view of the arena: the reference count of a separate storage shows when torch has released the buffer.
            storage = torch._C._construct_storage_from_data_pointer(begin, self._arena.device, bucket.nbytes)
            buffer = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (elements,), (1,))
        begin = buffer.data_ptr()
        reference = StorageWeakRef(buffer.untyped_storage())  # type: ignore[no-untyped-call]
        self._uses.append(Use(unit, begin, begin + bucket.nbytes, reference.expired))
        return buffer

    def schedule(self) -> Schedule:
        """Return the schedule of the recorded requests. Real release times are not used, because they differ between ranks."""
        parts = groupby(self._requests, key=lambda request: request[0])
        passes = [(which, [unit for _, unit in part]) for which, part in parts]
        return placement.schedule(self._buckets, passes, self._in_flight)

    def step_done(self) -> int:
        """Plan the addresses after the first step. Return how many buffers torch allocated in the step that has ended."""
        # Plan only after a whole step, because some settings reduce gradients only in the last micro batch.
        if self._arena is not None or not self._requests:
            return 0
        plan = self._place(self.schedule())
        self.offsets = plan.offsets
        block = torch.empty(plan.nbytes + placement.ALIGNMENT, dtype=torch.uint8, device=self._device)
        self._arena = block[placement.aligned(block.data_ptr()) - block.data_ptr() :]
        empty_cache(block.device)
        return len(self._requests)

    def _check(self, unit: str, bucket: Bucket) -> None:
        if unit not in self.offsets:
            raise ConfigError(
                f"parallelism.buffers: '{unit}' requests a buffer, but buffers were planned only for the units that requested "
                f"one in the first step: {', '.join(self.offsets)}; {INSTEAD}"
            )
        planned = self._buckets[unit]
        if bucket.dtype != planned.dtype or bucket.nbytes > planned.nbytes:
            raise ConfigError(
                f"parallelism.buffers: '{unit}' requests {bucket.nbytes:,} bytes of {bucket.dtype}, but its buffer has "
                f"{planned.nbytes:,} bytes of {planned.dtype}; {INSTEAD}"
            )

    def _wait_until_free(self, unit: str, begin: int = 0, end: int = 0) -> None:
        """Wait until the unit's buffers and all buffers overlapping [begin, end) are free. Raise ConfigError after PATIENCE_S."""
        self._uses = [use for use in self._uses if not use.released()]
        deadline = time.monotonic() + PATIENCE_S
        for use in self._uses:
            while not use.released() and (use.unit == unit or (use.begin < end and begin < use.end)):
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"parallelism.buffers: '{unit}' requests a second buffer while its first buffer is in use; {INSTEAD}"
                        if use.unit == unit
                        else f"parallelism.buffers: '{unit}' would overwrite the buffer in use by '{use.unit}'; {INSTEAD}"
                    )
                time.sleep(1e-4)


class PooledAllGather(DefaultAllGather):
    """The all-gather of one unit, with an output buffer from the pool. The input needs no buffer: it is a slice of the output."""

    def __init__(self, unit: str, pool: BufferPool) -> None:
        self.unit, self.pool = unit, pool

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.pool.take(self.unit, math.prod(size), dtype, device)


class PooledReduceScatter(DefaultReduceScatter):
    """The reduce-scatter of one unit, with an input buffer from the pool. torch allocates the output; `.grad` is a view of it."""

    def __init__(self, unit: str, pool: BufferPool) -> None:
        self.unit, self.pool = unit, pool
        self.is_input = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # torch allocates twice for each reduce-scatter: the input, then the output.
        is_input, self.is_input = self.is_input, not self.is_input
        if is_input:
            return self.pool.take(self.unit, math.prod(size), dtype, device)
        return super().allocate(size, dtype=dtype, device=device)


pools_of: WeakKeyDictionary[nn.Module, tuple[BufferPool, BufferPool]] = WeakKeyDictionary()
"""A pair of pools for each model: (pool of all-gather outputs, pool of reduce-scatter inputs)."""


def install(model: nn.Module, plan: str, prefetch: int) -> None:
    """Make all units of a model take their communication buffers from two new pools. plan: a key of PLANS, such as scheduled."""
    network = network_of(model)
    units = {clean_name(name): each for name, each in model.named_modules() if isinstance(each, FSDPModule)}
    place = placement.PLANS[plan]
    repeats = any(network.calls(name) > 1 for name in units)
    gathers = BufferPool(place, placement.all_gather_outputs(prefetch, repeats=repeats))
    reductions = BufferPool(place, placement.REDUCE_SCATTER_INPUTS)
    for name, module in units.items():
        unit = name or "root"
        module.set_custom_all_gather(PooledAllGather(unit, gathers))
        module.set_custom_reduce_scatter(PooledReduceScatter(unit, reductions))
    pools_of[model] = gathers, reductions

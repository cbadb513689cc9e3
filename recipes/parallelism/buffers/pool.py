"""Buffers of one kind on one device: first dynamic, and recorded; then served from planned places, and checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.buffers.plan import ALIGNMENT, Bucket, Plan, Schedule, aligned
from meshrunner.recipes.parallelism.buffers.requests import Kept, schedule

PATIENCE_S = 5.0
"""How long a place may be in use beyond its time: threads of gloo let go of a buffer a moment after the collective has ended."""
INSTEAD = "use parallelism.buffers=dynamic"


class Request(NamedTuple):
    """What a unit asked for."""

    unit: str
    bucket: Bucket
    in_backward: bool


class Use(NamedTuple):
    """A buffer that was handed out."""

    unit: str
    begin: int
    end: int
    storage: StorageWeakRef

    @property
    def alive(self) -> bool:
        """Whether anything still refers to the buffer: a view, a thread of torch."""
        return not self.storage.expired()  # type: ignore[no-untyped-call]


class Pool:
    """
    Outputs of all-gathers, or inputs of reductions, of all units.

    In the first optimizer step the allocator serves every request, and it is recorded. Then each unit has one place in an arena.
    Every request checks that nothing else uses the place: a plan that does not fit is an error, and never a wrong number.

    On a GPU a place is used again as the caching allocator would use a block again: before FSDP2 lets go of a buffer, it has the
    stream that fills the next one wait for the last reader.
    """

    def __init__(self, place: Callable[[Schedule], Plan], kept: Kept) -> None:
        self._place, self._kept = place, kept
        self.requests: list[Request] = []
        """Those of the first step."""
        self.offsets: dict[str, int] = {}
        """Unit -> where its place begins in the arena, in bytes."""
        self._sizes: dict[str, Bucket] = {}
        """Unit -> the largest bucket it has asked for."""
        self._device: torch.device | None = None
        self._arena: Tensor | None = None
        self._allocations = 0
        self._uses: list[Use] = []

    def take(self, unit: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, [elements], not initialised; raises ConfigError for a request that the plan does not serve."""
        bucket = Bucket(str(dtype), elements * dtype.itemsize)
        if self._arena is None:
            self._wait_until_free(unit)
            in_backward = torch._C._current_graph_task_id() != -1  # as FSDP2 tells one
            self.requests.append(Request(unit, bucket, in_backward))
            self._sizes[unit] = max(self._sizes.get(unit, bucket), bucket, key=lambda each: each.nbytes)
            self._allocations += 1
            buffer = torch.empty(elements, dtype=dtype, device=device)
        else:
            self._check(unit, bucket)
            place = self._arena[self.offsets[unit] :][: bucket.nbytes]
            if place.is_meta:  # without addresses there is nothing to check
                return place.view(dtype)
            begin = place.data_ptr()
            self._wait_until_free(unit, begin, begin + bucket.nbytes)
            # A storage of its own, and no view of the arena's: the references to it tell when torch has let go.
            storage = torch._C._construct_storage_from_data_pointer(begin, self._arena.device, bucket.nbytes)
            buffer = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (elements,), (1,))
        begin = buffer.data_ptr()
        self._device = device
        reference = StorageWeakRef(buffer.untyped_storage())  # type: ignore[no-untyped-call]
        self._uses.append(Use(unit, begin, begin + bucket.nbytes, reference))
        return buffer

    def schedule(self) -> Schedule:
        """What was recorded. Only the order counts, the same on all ranks: when a thread lets go of a buffer is chance."""
        passes = groupby(self.requests, key=lambda request: request.in_backward)
        return schedule(self._sizes, [(which, [each.unit for each in part]) for which, part in passes], self._kept)

    def step_done(self) -> int:
        """How many buffers the allocator served in the optimizer step that has ended. After the first one, place all units."""
        count, self._allocations = self._allocations, 0
        if self.requests and self._arena is None:
            plan = self._place(self.schedule())
            self.offsets = {unit: offset for unit, (offset,) in plan.offsets.items()}
            block = torch.empty(plan.nbytes + ALIGNMENT, dtype=torch.uint8, device=self._device)
            self._arena = block[aligned(block.data_ptr()) - block.data_ptr() :]
        return count

    def _check(self, unit: str, bucket: Bucket) -> None:
        if unit not in self.offsets:
            known = ", ".join(self.offsets)
            raise ConfigError(
                f"parallelism.buffers: '{unit}' asks for a buffer, and only these had one: {known}; {INSTEAD}"
            )
        planned = self._sizes[unit]
        if bucket.dtype != planned.dtype or bucket.nbytes > planned.nbytes:
            raise ConfigError(
                f"parallelism.buffers: '{unit}' asks for {bucket.nbytes:,} bytes of {bucket.dtype}, and has a place for "
                f"{planned.nbytes:,} of {planned.dtype}; {INSTEAD}"
            )

    def _wait_until_free(self, unit: str, begin: int = 0, end: int = 0) -> None:
        """Raise ConfigError if another buffer of the unit, or one that lies in the range, stays in use."""
        self._uses = [use for use in self._uses if use.alive]
        deadline = time.monotonic() + PATIENCE_S
        for use in self._uses:
            while use.alive and (use.unit == unit or (use.begin < end and begin < use.end)):
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"parallelism.buffers: '{unit}' asks twice in a row, and has one place; {INSTEAD}"
                        if use.unit == unit
                        else f"parallelism.buffers: '{unit}' would overwrite '{use.unit}', which is in use; {INSTEAD}"
                    )
                time.sleep(1e-4)

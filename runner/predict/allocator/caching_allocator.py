"""Models how much memory the CUDA caching allocator reserves (c10/cuda/CUDACachingAllocator.cpp, torch 2.13)."""

import re
from collections.abc import Callable

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.predict.allocator.segments import BlockPool, ExpandableSegments, MemoryBlock, Segments, round_up

UNIT = 512
"""Bytes of the smallest block. Every block size is a multiple of UNIT."""
SMALL = 2**20
"""Largest small request, in bytes. A larger request splits a fixed segment's block only if more than SMALL bytes would remain."""


class OutOfMemory(Exception):
    """Error raised if neither the cache nor the device has enough memory for a request."""


class CachingAllocator:
    """Allocator that serves a request from the smallest cached block that is large enough, or else from a new segment.

    Each stream has its own cached blocks. Sizes are in bytes. Some settings are not modelled (see `allocator_settings`). Among
    free blocks of equal size, this model may choose a different block than torch, because the model's addresses are not real.
    """

    def __init__(self, capacity: int | None, *, expandable: bool) -> None:
        """Create an empty allocator that can reserve `capacity` bytes, or unlimited memory if `capacity` is None."""
        self.active = 0
        """Bytes of blocks in use (`active_bytes` in torch)."""
        self.retries = 0
        """Number of requests that flushed the cache (`num_alloc_retries` in torch)."""
        self.synchronize: Callable[[], None] = lambda: None
        """Callback that runs before each cache flush: it waits for the device, then frees blocks that other streams used."""
        self._expandable = expandable
        self.segments = ExpandableSegments(capacity) if expandable else Segments(capacity)
        self._pools: dict[tuple[int, bool, bool], BlockPool] = {}
        """Pools, keyed by (stream, whether the pool is for small blocks, whether the pool belongs to a CUDA graph)."""
        self._capturing = False

    def allocate(self, nbytes: int, stream: int) -> MemoryBlock:
        """Return a block of at least `nbytes` bytes, or raise OutOfMemory."""
        size = round_up(nbytes, UNIT)
        small = size <= SMALL
        key = stream, small, self._capturing
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = BlockPool(small)
        block = pool.best_fit(size) or self.segments.add(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self.segments.add(pool, size)
        if block is None:
            raise OutOfMemory
        rest = block.size - size
        if rest > SMALL or (rest >= UNIT and (small or self._expandable)):
            pool.add(block.split(size))
        block.allocated = True
        self.active += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        self.active -= block.size
        block.allocated = False
        block.pool.merge(block)
        block.pool.add(block)

    def begin_capture(self) -> None:
        """Empty the cache, and serve all later requests from the private pools of a CUDA graph."""
        self.empty_cache()
        self._capturing = True

    def empty_cache(self) -> None:
        """Release all entirely free fixed segments, and all entirely free pages of expandable segments, to the device."""
        self.synchronize()
        for pool in self._pools.values():
            self.segments.release(pool)


def allocator_settings(name: str, conf: str) -> tuple[bool, list[str]]:
    """Parse `conf`, the value of variable `name`. Return whether segments are expandable, and remarks on unmodelled settings."""
    expandable, remarks = False, []
    for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", conf)):  # split at commas outside of brackets
        key, _, value = item.partition(":")
        if key == "expandable_segments":
            if value not in ("True", "False"):
                raise ConfigError(f"{name}: {key} must be True or False, but it is '{value}'")
            expandable = value == "True"
        elif item not in ("", "backend:native"):
            remarks.append(f"{name}: the prediction ignores {item}")
    return expandable, remarks

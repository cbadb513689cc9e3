"""The CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, torch 2.13): how much it reserves, not at which addresses."""

from __future__ import annotations

import sys
from collections.abc import Callable

from meshrunner.runner.predict.allocator.alloc_conf import UNIT, AllocatorSettings
from meshrunner.runner.predict.allocator.expandable import ExpandableSegments
from meshrunner.runner.predict.allocator.segments import (
    MIB,
    BlockPool,
    DeviceMemory,
    FixedSegments,
    MemoryBlock,
)

SMALL = MIB
"""Largest request of a small pool. A large pool splits a block only if more than this is left over."""
MAX_NON_SPLIT_ROUNDING = 20 * MIB
"""An oversize block must be less than this larger than the request it serves."""


class OutOfMemory(Exception):
    """Neither the cache nor the device has room for a request. Sizes are in bytes."""

    def __init__(self, requested: int, active: int, reserved: int) -> None:
        super().__init__(f"requested {requested} bytes; {active} of {reserved} reserved bytes are active")
        self.requested = requested
        self.active = active
        self.reserved = reserved


class CachingAllocator:
    """
    Serves requests with the best fit from a stream's cache, or from a new segment. Sizes are in bytes.

    Not modelled: `garbage_collection_threshold` (see `AllocatorSettings.ignored`), private pools (CUDA graphs), and the driver's
    choice of addresses, which only decides between free blocks of equal size.
    """

    def __init__(self, capacity: int | None, settings: AllocatorSettings) -> None:
        """
        Args:
            capacity: bytes this process can reserve: the device's memory less contexts and communicators. None: unlimited.
        """
        self.active = self.peak_active = 0
        """Bytes of blocks in use, as torch's `active_bytes`."""
        self.retries = 0
        """Number of times the cache was flushed for a request, as torch's `num_alloc_retries`."""
        self.synchronize: Callable[[], None] = lambda: None
        """Called before the cache is flushed: waits for the device, and frees the blocks that wait for it."""
        self._settings = settings
        self._max_split_size = sys.maxsize if settings.max_split_size is None else settings.max_split_size
        self._device = DeviceMemory(capacity)
        segments = ExpandableSegments if settings.expandable_segments else FixedSegments
        self._segments = segments(self._device, settings.large_segment_size)
        self._pools: dict[tuple[int, bool], BlockPool] = {}

    @property
    def reserved(self) -> int:
        """Bytes of segments, as torch's `reserved_bytes`."""
        return self._device.reserved

    @property
    def peak_reserved(self) -> int:
        """Most bytes of segments since the last `reset_peaks`."""
        return self._device.peak

    def reset_peaks(self) -> None:
        """Start measuring peaks again; the cache is kept."""
        self.peak_active = self.active
        self._device.peak = self._device.reserved

    def allocate(self, nbytes: int, stream: int) -> MemoryBlock:
        """Return a block for a request, or raise OutOfMemory."""
        size = self._settings.rounded(nbytes)
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = BlockPool(small)
        block = self._from_cache(pool, size) or self._from_device(pool, size)
        if block is None:
            raise OutOfMemory(nbytes, self.active, self.reserved)
        if self._splits(block, size):
            pool.add(block.split(size))
        block.allocated = True
        self.active += block.size
        if self.active > self.peak_active:
            self.peak_active = self.active
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to the cache."""
        self.active -= block.size
        block.allocated = False
        block.pool.merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give free memory back to the device, except where it shares a segment or page with memory in use."""
        self.synchronize()
        for pool in self._pools.values():
            self._segments.release(pool)

    def _splits(self, block: MemoryBlock, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self._settings.expandable_segments:
            return rest >= UNIT
        return rest > SMALL and size < self._max_split_size

    def _from_cache(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        block = pool.best_fit(size)
        if block is None:
            return None
        # An oversize block is never split, so a much smaller request would waste it. torch does not look for another one then.
        wasted = size < self._max_split_size or block.size >= size + MAX_NON_SPLIT_ROUNDING
        if block.size >= self._max_split_size and wasted:
            return None
        pool.remove(block)
        return block

    def _from_device(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        block = self._segments.add(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._segments.add(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._segments.add(pool, size)
        return block

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Give back the smallest oversize block that is large enough, else the largest ones; return whether that suffices."""
        if self._settings.max_split_size is None or not isinstance(self._segments, FixedSegments):
            return False
        wanted = max(size, self._max_split_size)
        released = 0
        oversize = [block for block in pool.free_blocks() if block.size >= self._max_split_size]
        enough = next((block for block in oversize if block.size >= wanted), None)
        for block in (enough,) if enough is not None else reversed(oversize):
            if released < wanted:
                self._segments.release_block(block)
                released += block.size
        return released >= wanted

"""A model of torch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, torch 2.13): what it reserves, not where."""

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
    Segments,
)

SMALL = MIB
"""Largest request of a small pool; of a large pool's block this much is not split off."""


class OutOfMemory(Exception):
    """A request fits neither into the cache nor into what the device has left. In bytes."""

    def __init__(self, asked: int, active: int, reserved: int) -> None:
        super().__init__(f"asked for {asked} bytes; of {reserved} reserved {active} are active")
        self.asked = asked
        self.active = active
        self.reserved = reserved


class CachingAllocator:
    """
    Blocks by best fit from the cache of a stream, or from new segments. In bytes.

    Not modelled: `garbage_collection_threshold` (see `Settings.ignored`), private pools (CUDA graphs), and the driver's
    choice of addresses, which decides only between free blocks of equal size.
    """

    def __init__(self, capacity: int | None, settings: AllocatorSettings) -> None:
        """`capacity`: what this process can reserve, so the device's memory less contexts and communicators; None: any amount."""
        self.active = self.peak_active = 0
        """Of blocks, as torch's `active_bytes`."""
        self.retries = 0
        """How often the whole cache was given up for a request, as torch's `num_alloc_retries`."""
        self.synchronize: Callable[[], None] = lambda: None
        """Called before the cache is given up: waits for the device and frees the blocks that waited for it."""
        self._settings = settings
        self._max_split_size = sys.maxsize if settings.max_split_size is None else settings.max_split_size
        self._device = DeviceMemory(capacity)
        self._fixed = None if settings.expandable_segments else FixedSegments(self._device, settings.large_segment_size)
        self._segments: Segments = self._fixed or ExpandableSegments(self._device, settings.large_segment_size)
        self._pools: dict[tuple[int, bool], BlockPool] = {}

    @property
    def reserved(self) -> int:
        """Of segments, as torch's `reserved_bytes`."""
        return self._device.reserved

    @property
    def peak_reserved(self) -> int:
        """Since the last `reset_peaks`."""
        return self._device.peak

    def reset_peaks(self) -> None:
        """Peaks count from now on; the cache stays."""
        self.peak_active = self.active
        self._device.peak = self._device.reserved

    def allocate(self, nbytes: int, stream: int) -> MemoryBlock:
        """A block for one request; raises OutOfMemory."""
        size = self._settings.rounded(nbytes)
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = BlockPool(small)
        block = self._cached(pool, size) or self._added(pool, size)
        if block is None:
            raise OutOfMemory(nbytes, self.active, self.reserved)
        if self._splits(block, size):
            pool.put(block.split(size))
        block.allocated = True
        self.active += block.size
        if self.active > self.peak_active:
            self.peak_active = self.active
        return block

    def free(self, block: MemoryBlock) -> None:
        """The block is in the cache again."""
        self.active -= block.size
        block.allocated = False
        block.pool.merge(block)
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Gives back to the device all that is free; memory that shares a segment with what is not stays."""
        self.synchronize()
        for pool in self._pools.values():
            self._segments.release(pool)

    def _splits(self, block: MemoryBlock, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self._settings.expandable_segments:
            return rest >= UNIT
        return rest > SMALL and size < self._max_split_size

    def _cached(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        block = pool.best_fit(size)
        if block is None:
            return None
        # Oversize blocks, which are not split, would be wasted on a smaller request; torch looks no further then.
        too_small = size < self._max_split_size or block.size >= size + self._settings.max_non_split_rounding
        if block.size >= self._max_split_size and too_small:
            return None
        pool.take(block)
        return block

    def _added(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        block = self._segments.add(pool, size)
        if block is None and self._released_oversize(pool, size):
            block = self._segments.add(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._segments.add(pool, size)
        return block

    def _released_oversize(self, pool: BlockPool, size: int) -> bool:
        """Gives up the smallest oversize block that is large enough, or the largest ones together; whether that is enough."""
        if self._fixed is None or self._settings.max_split_size is None:
            return False
        wanted = max(size, self._max_split_size)
        released = 0
        oversize = [block for block in pool.free_blocks() if block.size >= self._max_split_size]
        enough = next((block for block in oversize if block.size >= wanted), None)
        for block in (enough,) if enough is not None else reversed(oversize):
            if released < wanted:
                self._fixed.release_block(block)
                released += block.size
        return released >= wanted

"""The CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, torch 2.13): how much it reserves, not at which addresses."""

from __future__ import annotations

import re
from collections.abc import Callable

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.predict.allocator.segments import (
    MIB,
    BlockPool,
    ExpandableSegments,
    MemoryBlock,
    Segments,
    round_up,
)

UNIT = 512
"""Every block is a multiple of this many bytes."""
SMALL = MIB
"""Largest request of a small pool. A large pool of fixed segments splits a block only if more than this is left over."""


class OutOfMemory(Exception):
    """Neither the cache nor the device has room for a request."""


class CachingAllocator:
    """
    Serves requests with the best fit from a stream's cache, or from a new segment. Sizes are in bytes.

    Not modelled: the settings that `allocator_settings` reports, private pools (CUDA graphs), and the driver's choice of
    addresses, which only decides between free blocks of equal size.
    """

    def __init__(self, capacity: int | None, *, expandable: bool) -> None:
        """`capacity`: bytes that this process can reserve, None if unlimited. `expandable`: `expandable_segments:True`."""
        self.active = 0
        """Bytes of blocks in use, as torch's `active_bytes`."""
        self.retries = 0
        """Number of times the cache was flushed for a request, as torch's `num_alloc_retries`."""
        self.synchronize: Callable[[], None] = lambda: None
        """Called before the cache is flushed: waits for the device, and frees the blocks that wait for it."""
        self._expandable = expandable
        self.segments = ExpandableSegments(capacity) if expandable else Segments(capacity)
        self._pools: dict[tuple[int, bool], BlockPool] = {}

    def allocate(self, nbytes: int, stream: int) -> MemoryBlock:
        """Return a block for a request, or raise OutOfMemory."""
        size = round_up(nbytes, UNIT)
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = BlockPool(small)
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
        """Return a block to the cache."""
        self.active -= block.size
        block.allocated = False
        block.pool.merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give free memory back to the device, except where it shares a segment or page with memory in use."""
        self.synchronize()
        for pool in self._pools.values():
            self.segments.release(pool)


def allocator_settings(name: str, conf: str) -> tuple[bool, list[str]]:
    """
    Return whether segments are expandable, and a sentence for each setting that is not modelled.

    `name` and `conf` are the name and value of PYTORCH_ALLOC_CONF or one of its older names.
    """
    expandable, remarks = False, []
    for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", conf)):  # at commas outside of brackets
        key, _, value = item.partition(":")
        if key == "expandable_segments":
            if value not in ("True", "False"):
                raise ConfigError(f"{name}: {item}: must be True or False")
            expandable = value == "True"
        elif item not in ("", "backend:native"):
            remarks.append(f"{name}: {item} is not modelled")
    return expandable, remarks

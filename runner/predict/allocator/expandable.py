"""Segments that grow (`expandable_segments:True`): addresses are plenty, and memory is mapped into them in pages."""

from __future__ import annotations

from bisect import insort

from meshrunner.runner.predict.allocator.segments import (
    ADDRESSES,
    SMALL_SEGMENT,
    BlockPool,
    DeviceMemory,
    MemoryBlock,
    round_up,
)


class ExpandableSegments:
    """One segment per pool; pages that are free as a whole can be unmapped and mapped elsewhere."""

    def __init__(self, device: DeviceMemory, large_page: int) -> None:
        self._device = device
        self._large_page = large_page

    def add(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """The lowest place with room for `size` bytes; pages are mapped where there are none yet."""
        block = self._place(pool, size)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:  # what follows it is unmapped, or the place would have no room
            after = block.after
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # has taken in what lay before it
        pool.take(block)
        return block

    def release(self, pool: BlockPool) -> None:
        """Unmaps every page that is free as a whole."""
        page = self._page(pool)
        for block in pool.free_blocks():
            begin, end = round_up(block.address, page), (block.address + block.size) // page * page
            if begin < end:
                pool.take(block)
                self._unmap(block, begin, end)

    def _page(self, pool: BlockPool) -> int:
        return SMALL_SEGMENT if pool.small else self._large_page

    def _place(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Where free and unmapped blocks with room for `size` bytes begin."""
        for _, unmapped in pool.unmapped:
            before = unmapped.before
            first = unmapped if before is None or before.allocated else before
            room, block = 0, first
            while room < size and not block.allocated:
                room += block.size
                if block.after is None:
                    break
                block = block.after
            if room >= size:
                return first
        page = self._page(pool)
        nbytes = round_up(ADDRESSES, page)
        segment = MemoryBlock(pool, self._device.addresses(nbytes, page), nbytes, mapped=False)
        insort(pool.unmapped, (segment.address, segment))
        return segment

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Maps the first `size` bytes in whole pages, all of them or none; what is mapped is free, in one with its neighbours."""
        pool = block.pool
        nbytes = round_up(size, self._page(pool))
        if not self._device.reserve(nbytes):
            return False
        pool.unmapped.remove((block.address, block))
        if nbytes < block.size:
            rest = block.split(nbytes)
            insort(pool.unmapped, (rest.address, rest))
        block.mapped = True
        pool.merge(block)
        pool.put(block)
        return True

    def _unmap(self, block: MemoryBlock, begin: int, end: int) -> None:
        """Unmaps these addresses of a free block; what lies around them stays free."""
        pool = block.pool
        if block.address + block.size > end:
            pool.put(block.split(end - block.address))
        if block.address < begin:
            free, block = block, block.split(begin - block.address)
            pool.put(free)
        block.mapped = False
        self._device.release(block.size)
        pool.merge(block)
        if block.is_split:
            insort(pool.unmapped, (block.address, block))

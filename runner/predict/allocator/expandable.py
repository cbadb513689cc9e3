"""Segments that grow (`expandable_segments:True`): a huge range of addresses, with memory mapped to it page by page."""

from __future__ import annotations

from bisect import insort

from meshrunner.runner.predict.allocator.segments import SMALL_SEGMENT, BlockPool, DeviceMemory, MemoryBlock, round_up

ADDRESSES = 2**50
"""Size of an expandable segment in bytes: more than the memory of any device, so one per pool is enough."""


class ExpandableSegments:
    """One segment per pool. A page that is entirely free can be unmapped, and its memory used elsewhere."""

    def __init__(self, device: DeviceMemory, large_page: int) -> None:
        self._device = device
        self._large_page = large_page

    def add(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return the lowest range with room for `size` bytes, mapping the pages it lacks, or None if memory runs out."""
        block = self._lowest_range(pool, size)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:  # the range has room, so the block after this one is unmapped
            after = block.after
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # `_map` merged the blocks
        pool.remove(block)
        return block

    def release(self, pool: BlockPool) -> None:
        """Unmap every page that is entirely free."""
        page = self._page(pool)
        for block in pool.free_blocks():
            begin, end = round_up(block.address, page), (block.address + block.size) // page * page
            if begin < end:
                pool.remove(block)
                self._unmap(block, begin, end)

    def _page(self, pool: BlockPool) -> int:
        return SMALL_SEGMENT if pool.small else self._large_page

    def _lowest_range(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Return the first block of the lowest range of free and unmapped blocks that has room for `size` bytes."""
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
        """Map the pages of the first `size` bytes, all or none. The mapped block is free and merged with its neighbours."""
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
        pool.add(block)
        return True

    def _unmap(self, block: MemoryBlock, begin: int, end: int) -> None:
        """Unmap these addresses of a free block; its other parts stay free."""
        pool = block.pool
        if block.address + block.size > end:
            pool.add(block.split(end - block.address))
        if block.address < begin:
            free, block = block, block.split(begin - block.address)
            pool.add(free)
        block.mapped = False
        self._device.release(block.size)
        pool.merge(block)
        if block.is_split:
            insort(pool.unmapped, (block.address, block))

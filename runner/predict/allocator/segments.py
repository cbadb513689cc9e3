"""Defines segments (memory reserved from the driver) and blocks (the parts into which segments are split). Sizes are in bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB
"""Smallest request, in bytes, that gets its own fixed segment. The segment's size is a multiple of OWN_SEGMENT_UNIT."""
OWN_SEGMENT_UNIT = 2 * MIB
ADDRESSES = 2**50
"""Bytes in the address range of an expandable segment. Each pool needs only one segment, because no device has 2**50 bytes."""


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """Part of a segment, linked to the blocks directly before and after it."""

    pool: BlockPool
    address: int
    size: int
    """Rounded size of the request, plus any remainder that was too small to split off."""
    mapped: bool = True
    """Whether memory is mapped to the block's addresses. Blocks of fixed segments are always mapped."""
    allocated: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.before is not None or self.after is not None

    def split(self, size: int) -> MemoryBlock:
        """Shrink this block to its first `size` bytes and return the rest as a new block."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size, self.mapped, before=self, after=self.after)
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest


class BlockPool:
    """Free blocks of one stream. Small and large requests have separate pools."""

    __slots__ = ("free", "segment", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        """Size of a fixed segment, or of a page of an expandable segment."""
        self.free: list[tuple[int, int, MemoryBlock]] = []
        """Free blocks, ordered by size and address."""
        self.unmapped: list[tuple[int, MemoryBlock]] = []
        """Unmapped blocks of expandable segments, ordered by address."""

    def add(self, block: MemoryBlock) -> None:
        """Add a free block that is already merged with its free neighbours."""
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def best_fit(self, size: int) -> MemoryBlock | None:
        """Remove and return the smallest free block of at least `size` bytes. Among equal sizes, choose the lowest address.
        Unmapped memory directly after a block counts towards the block's size, so a segment's last mapped block is used last."""
        free = self.free
        i = bisect_left(free, (size,))
        if i == len(free):
            return None
        if self.unmapped:
            while i + 1 < len(free) and _size_when_grown(free[i + 1][2]) < _size_when_grown(free[i][2]):
                i += 1
        return free.pop(i)[2]

    def merge(self, block: MemoryBlock) -> None:
        """Merge a free or unmapped block with neighbours in the same state, and remove these neighbours from the pool's lists."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            if other.mapped:
                self.remove(other)
            else:
                self.unmapped.remove((other.address, other))
            first, second = (other, block) if other is block.before else (block, other)
            block.address = first.address
            block.size += other.size
            block.before, block.after = first.before, second.after
            if block.before is not None:
                block.before.after = block
            if block.after is not None:
                block.after.before = block


def _size_when_grown(block: MemoryBlock) -> int:
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


class Segments:
    """Set of fixed segments (`cudaMalloc`), which cannot grow or shrink. Only an entirely free segment can be released."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = 0
        """Bytes of all segments (`reserved_bytes` in torch)."""
        self.peak = 0
        """Peak of `reserved` so far. Callers may set `peak` to begin a new measurement."""
        self._end = 0

    def add(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return a new segment as a block of at least `size` bytes, or None if the device has too little memory left."""
        nbytes = pool.segment if size < OWN_SEGMENT else round_up(size, OWN_SEGMENT_UNIT)
        return MemoryBlock(pool, self._addresses(nbytes), nbytes) if self._reserve(nbytes) else None

    def release(self, pool: BlockPool) -> None:
        for _, _, block in pool.free.copy():
            if not block.is_split:
                pool.remove(block)
                self.reserved -= block.size

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def _addresses(self, nbytes: int) -> int:
        """Return the start of a new address range: a multiple of LARGE_SEGMENT above all earlier ranges."""
        begin = self._end
        self._end = round_up(begin + nbytes, LARGE_SEGMENT)
        return begin


class ExpandableSegments(Segments):
    """Set of expandable segments, one per pool (`expandable_segments:True`). Each segment is a huge address range, whose
    pages are mapped on demand. An entirely free page can be unmapped, so that another pool can use the memory."""

    def add(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return a block of at least `size` bytes at the lowest address with enough room. Return None if memory runs out."""
        block = self._lowest_range(pool, size)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:  # an unmapped block follows, because the range has `size` bytes
            after = block.after
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # `_map` merged `block` into `after`
        pool.remove(block)
        return block

    def release(self, pool: BlockPool) -> None:
        page = pool.segment
        for _, _, block in pool.free.copy():
            begin, end = round_up(block.address, page), (block.address + block.size) // page * page
            if begin < end:
                pool.remove(block)
                self._unmap(block, begin, end)

    def _lowest_range(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Find the lowest address range of `size` bytes without an allocated block. Return the first block of the range."""
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
        nbytes = round_up(ADDRESSES, pool.segment)
        segment = MemoryBlock(pool, self._addresses(nbytes), nbytes, mapped=False)
        insort(pool.unmapped, (segment.address, segment))
        return segment

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Map the pages of a block's first `size` bytes and merge them with free neighbours. Return False if memory runs out."""
        pool = block.pool
        nbytes = round_up(size, pool.segment)
        if not self._reserve(nbytes):
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
        """Unmap addresses `begin` to `end` of a free block, and keep the rest of the block mapped and free."""
        pool = block.pool
        if block.address + block.size > end:
            pool.add(block.split(end - block.address))
        if block.address < begin:
            free, block = block, block.split(begin - block.address)
            pool.add(free)
        block.mapped = False
        self.reserved -= block.size
        pool.merge(block)
        if block.is_split:
            insort(pool.unmapped, (block.address, block))

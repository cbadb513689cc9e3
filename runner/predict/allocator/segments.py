"""Segments of device memory, and the blocks that the caching allocator cuts them into."""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 2**20
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB
"""A request of at least this size gets a segment of its own size, rounded up to OWN_SEGMENT_UNIT."""
OWN_SEGMENT_UNIT = 2 * MIB


def round_up(nbytes: int, unit: int) -> int:
    """Return the next multiple of `unit`."""
    return -(-nbytes // unit) * unit


class MemoryBlock:
    """A piece of a segment, linked with the pieces before and after it."""

    __slots__ = ("address", "after", "allocated", "before", "mapped", "pool", "size")

    def __init__(self, pool: BlockPool, address: int, size: int, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        """Rounded size in bytes, plus a remainder that was too small to split off."""
        self.allocated = False
        self.mapped = mapped
        """Whether memory is mapped to the addresses; false only in expandable segments."""
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.before is not None or self.after is not None

    def split(self, size: int) -> MemoryBlock:
        """Keep the first `size` bytes and return the rest as a new block."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size, self.mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest


class BlockPool:
    """The free blocks of one stream, either for small or for large requests."""

    __slots__ = ("_free", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []
        """Unmapped blocks of expandable segments, ordered by address."""

    def free_blocks(self) -> list[MemoryBlock]:
        """Return the free blocks ordered by size, then address."""
        return [block for _, _, block in self._free]

    def add(self, block: MemoryBlock) -> None:
        """Add a free block. It must already be merged with its free neighbours."""
        insort(self._free, (block.size, block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        """Remove a free block."""
        del self._free[bisect_left(self._free, (block.size, block.address))]

    def best_fit(self, size: int) -> MemoryBlock | None:
        """
        Return the smallest free block of at least `size` bytes, at the lowest address if there are several.

        A block that can still grow counts as the size it can reach, so the last block of an expandable segment is used last.
        """
        free = self._free
        i = bisect_left(free, (size,))
        if i == len(free):
            return None
        if self.unmapped:
            while i + 1 < len(free) and _size_when_grown(free[i + 1][2]) < _size_when_grown(free[i][2]):
                i += 1
        return free[i][2]

    def merge(self, block: MemoryBlock) -> None:
        """Merge an unallocated block, which is in no list yet, with its unallocated neighbours. Remove those from their lists."""
        before, after = block.before, block.after
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self._take_from_its_list(before)
            block.address = before.address
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self._take_from_its_list(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def _take_from_its_list(self, block: MemoryBlock) -> None:
        if block.mapped:
            self.remove(block)
        else:
            self.unmapped.remove((block.address, block))


def _size_when_grown(block: MemoryBlock) -> int:
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


class DeviceMemory:
    """Counts the bytes reserved from the driver."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = self.peak = 0
        self._end = 0

    def reserve(self, nbytes: int) -> bool:
        """Reserve memory if enough is left, and return whether it was reserved."""
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def release(self, nbytes: int) -> None:
        """Give memory back to the driver."""
        self.reserved -= nbytes

    def addresses(self, nbytes: int, unit: int) -> int:
        """Return the beginning of a new address range at a multiple of `unit`, above all earlier ones."""
        begin = round_up(self._end, unit)
        self._end = begin + nbytes
        return begin


class FixedSegments:
    """Segments of fixed size (`cudaMalloc`), which can be given back once they are entirely free."""

    def __init__(self, device: DeviceMemory, large_segment: int) -> None:
        self._device = device
        self._large_segment = large_segment

    def add(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return a new segment as one block, or None if the device has too little memory left."""
        nbytes = SMALL_SEGMENT if pool.small else self._large_segment
        if size >= OWN_SEGMENT:
            nbytes = round_up(size, OWN_SEGMENT_UNIT)
        if not self._device.reserve(nbytes):
            return None
        return MemoryBlock(pool, self._device.addresses(nbytes, SMALL_SEGMENT), nbytes)

    def release(self, pool: BlockPool) -> None:
        """Give back every entirely free segment of a pool."""
        for block in pool.free_blocks():
            if not block.is_split:
                self.release_block(block)

    def release_block(self, block: MemoryBlock) -> None:
        """Give back a free block that is a whole segment."""
        block.pool.remove(block)
        self._device.release(block.size)

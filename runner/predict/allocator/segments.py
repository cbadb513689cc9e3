"""Segments of device memory, and the blocks that the CUDA caching allocator cuts them into: the state behind `allocator`."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

MIB = 2**20
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB
"""A request from this size on gets a segment of its own size, in whole units of OWN_SEGMENT_UNIT."""
OWN_SEGMENT_UNIT = 2 * MIB
ADDRESSES = 2**50
"""Of an expandable segment: more than a device has memory, so one per pool is enough."""


def round_up(nbytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


class MemoryBlock:
    """A piece of a segment, linked with the pieces before and after it."""

    __slots__ = ("address", "after", "allocated", "before", "mapped", "pool", "size")

    def __init__(self, pool: BlockPool, address: int, size: int, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        """In bytes, as rounded; more than that where the rest of a block was not split off."""
        self.allocated = False
        self.mapped = mapped
        """Whether there is memory behind the addresses; only expandable segments have blocks without."""
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None

    @property
    def is_split(self) -> bool:
        """Whether it is less than its whole segment."""
        return self.before is not None or self.after is not None

    def split(self, size: int) -> MemoryBlock:
        """Keeps the first `size` bytes; the rest is a block of its own."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size, self.mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest


class BlockPool:
    """The free blocks of one stream, of small or of large requests."""

    __slots__ = ("_free", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []
        """By address: what memory can still be mapped into."""

    def free_blocks(self) -> list[MemoryBlock]:
        """Ordered by size, then address."""
        return [block for _, _, block in self._free]

    def put(self, block: MemoryBlock) -> None:
        """A block is free; its neighbours are not, see `merge`."""
        insort(self._free, (block.size, block.address, block))

    def take(self, block: MemoryBlock) -> None:
        """A free block is so no longer."""
        del self._free[bisect_left(self._free, (block.size, block.address))]

    def best_fit(self, size: int) -> MemoryBlock | None:
        """
        The smallest free block of at least `size` bytes, of equal ones the lowest.

        A block that can still grow counts as large as it can get: an expandable segment's last comes after all others.
        """
        free = self._free
        i = bisect_left(free, (size,))
        if i == len(free):
            return None
        if self.unmapped:
            while i + 1 < len(free) and _grown(free[i + 1][2]) < _grown(free[i][2]):
                i += 1
        return free[i][2]

    def merge(self, block: MemoryBlock) -> None:
        """A block that is not allocated takes in its neighbours that are not either; it is itself in no list yet."""
        before, after = block.before, block.after
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self._forget(before)
            block.address = before.address
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self._forget(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def _forget(self, block: MemoryBlock) -> None:
        if block.mapped:
            self.take(block)
        else:
            self.unmapped.remove((block.address, block))


def _grown(block: MemoryBlock) -> int:
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


class DeviceMemory:
    """Memory that the driver hands out: what is reserved of it, in bytes."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = self.peak = 0
        self._end = 0

    def reserve(self, nbytes: int) -> bool:
        """Whether there was so much left."""
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def release(self, nbytes: int) -> None:
        """So much is reserved no longer."""
        self.reserved -= nbytes

    def addresses(self, nbytes: int, unit: int) -> int:
        """Where a range begins that nothing had before, at a multiple of `unit`; it lies above all earlier ones."""
        begin = round_up(self._end, unit)
        self._end = begin + nbytes
        return begin


class Segments(Protocol):
    """How a pool comes by memory."""

    def add(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """A block of at least `size` bytes that is in no list; None if the device has not so much left."""

    def release(self, pool: BlockPool) -> None:
        """Gives back to the device what is free and can be given back."""


class FixedSegments:
    """Segments that keep their size (`cudaMalloc`): given back when they are free as a whole."""

    def __init__(self, device: DeviceMemory, large_segment: int) -> None:
        self._device = device
        self._large_segment = large_segment

    def add(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """A whole new segment."""
        nbytes = SMALL_SEGMENT if pool.small else self._large_segment
        if size >= OWN_SEGMENT:
            nbytes = round_up(size, OWN_SEGMENT_UNIT)
        if not self._device.reserve(nbytes):
            return None
        return MemoryBlock(pool, self._device.addresses(nbytes, SMALL_SEGMENT), nbytes)

    def release(self, pool: BlockPool) -> None:
        """Every segment that is free as a whole."""
        for block in pool.free_blocks():
            if not block.is_split:
                self.release_block(block)

    def release_block(self, block: MemoryBlock) -> None:
        """One that is free and a whole segment."""
        block.pool.take(block)
        self._device.release(block.size)

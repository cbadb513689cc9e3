"""The model of the CUDA caching allocator: each rule by hand, and invariants under random requests."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator, OutOfMemory, allocator_settings
from meshrunner.runner.predict.allocator.segments import MIB, BlockPool, MemoryBlock

FIXED, EXPANDABLE = False, True


def allocator(expandable: bool = FIXED, capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity, expandable=expandable)


@pytest.mark.parametrize(("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded(nbytes: int, size: int) -> None:
    made = allocator()
    made.allocate(nbytes, 0)
    assert made.active == size


def test_settings_are_read_as_torch_reads_them() -> None:
    assert allocator_settings("A", "") == allocator_settings("A", " backend:native, ") == (False, [])
    found = allocator_settings(
        "A",
        "expandable_segments:True, max_split_size_mb:64,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],backend:cudaMallocAsync",
    )
    ignored = [
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "backend:cudaMallocAsync",
    ]
    assert found == (True, [f"A: the prediction ignores {each}" for each in ignored])


def test_settings_that_torch_refuses_are_errors() -> None:
    with pytest.raises(ConfigError, match="A: expandable_segments must be True or False, but it is 'true'"):
        allocator_settings("A", "expandable_segments:true")


@pytest.mark.parametrize(
    ("expandable", "nbytes", "mib"),
    [
        (FIXED, 1, 2),
        (FIXED, MIB, 2),
        (FIXED, MIB + 1, 20),
        (FIXED, 10 * MIB - 512, 20),
        (FIXED, 10 * MIB, 10),
        (FIXED, 10 * MIB + 1, 12),
        (EXPANDABLE, 1, 2),
        (EXPANDABLE, MIB + 1, 20),
        (EXPANDABLE, 20 * MIB + 1, 40),
    ],
)
def test_size_of_a_new_segment(expandable: bool, nbytes: int, mib: int) -> None:
    made = allocator(expandable)
    made.allocate(nbytes, 0)
    assert made.segments.reserved == made.segments.peak == mib * MIB


@pytest.mark.parametrize("expandable", [FIXED, EXPANDABLE])
def test_streams_and_pools_share_nothing(expandable: bool) -> None:
    made = allocator(expandable)
    made.free(made.allocate(2 * MIB, 0))
    made.allocate(2 * MIB, 0)
    assert made.segments.reserved == 20 * MIB
    made.allocate(2 * MIB, 1)
    assert made.segments.reserved == 40 * MIB
    made.allocate(1, 0)
    assert made.segments.reserved == 42 * MIB


def test_best_fit_takes_the_lowest_of_equal_blocks() -> None:
    made = allocator()
    blocks = [made.allocate(mib * MIB, 0) for mib in (14, 12, 10, 12)]  # each a segment
    for block in blocks:
        made.free(block)
    assert made.allocate(11 * MIB, 0).address == blocks[1].address
    assert made.allocate(11 * MIB, 0).address == blocks[3].address
    assert made.allocate(11 * MIB, 0).address == blocks[0].address
    assert made.segments.reserved == 48 * MIB


def test_remainder_is_split_off() -> None:
    """A small block is split from 512 bytes on, a large one if more than 1 MiB is left over."""
    made = allocator()
    made.allocate(MIB, 0)
    assert made.allocate(MIB - 512, 0).size == MIB - 512
    assert made.allocate(512, 0).size == 512
    assert made.segments.reserved == 2 * MIB
    made = allocator()
    assert made.allocate(11 * MIB, 0).size == 12 * MIB
    assert made.allocate(11 * MIB - 512, 0).size == 11 * MIB - 512
    assert made.active == 23 * MIB - 512
    assert allocator(EXPANDABLE).allocate(20 * MIB - 512, 0).size == 20 * MIB - 512


def test_free_neighbours_merge() -> None:
    made = allocator()
    first, second, third, _ = (made.allocate(5 * MIB, 0) for _ in range(4))
    made.free(first)
    made.free(third)
    made.allocate(6 * MIB, 0)
    assert made.segments.reserved == 40 * MIB, "two free pieces with another between them"
    made.free(second)
    assert made.allocate(15 * MIB, 0).address == first.address
    assert made.segments.reserved == 40 * MIB


def test_cache_is_flushed_at_the_capacity() -> None:
    made = allocator(capacity=64 * MIB)
    whole, partly, rest = (made.allocate(mib * MIB, 0) for mib in (30, 5, 12))
    assert (made.segments.reserved, made.retries) == (50 * MIB, 0)
    made.free(whole)
    made.free(rest)  # shares its segment
    made.allocate(40 * MIB, 1)
    assert (made.segments.reserved, made.retries) == (60 * MIB, 1)
    assert made.segments.peak == 60 * MIB
    with pytest.raises(OutOfMemory):
        made.allocate(25 * MIB, 0)
    assert (made.active, made.segments.reserved, made.retries) == (45 * MIB, 60 * MIB, 2)
    made.free(partly)
    made.allocate(24 * MIB, 0)
    assert (made.segments.reserved, made.retries) == (64 * MIB, 3)


@pytest.mark.parametrize("expandable", [FIXED, EXPANDABLE])
def test_blocks_that_wait_for_the_device_are_freed_before_the_cache_is_flushed(expandable: bool) -> None:
    made = allocator(expandable, capacity=60 * MIB)
    waiting = [made.allocate(40 * MIB, 0)]
    made.synchronize = lambda: made.free(waiting.pop())
    made.allocate(20 * MIB, 1)
    assert waiting
    made.allocate(21 * MIB, 1)
    assert not waiting
    assert (made.active, made.retries) == (pytest.approx(41 * MIB, abs=MIB), 1)


def test_expandable_segments_grow() -> None:
    """The last block of a segment and new pages together serve a request that would otherwise need its own segment."""
    made = allocator(EXPANDABLE)
    first, second = made.allocate(30 * MIB, 0), made.allocate(30 * MIB, 0)
    assert made.segments.reserved == 60 * MIB
    made.free(second)
    third = made.allocate(45 * MIB, 0)
    assert third.address == second.address
    assert (made.active, made.segments.reserved) == (75 * MIB, 80 * MIB)
    made.free(first)
    assert made.allocate(5 * MIB, 0).address == first.address, "a hole before the segment's end, which can grow"


def test_expandable_segments_shrink_at_the_capacity() -> None:
    """Pages that are free as a whole are unmapped. A later request fills such gaps first."""
    made = allocator(EXPANDABLE, capacity=120 * MIB)
    first, second, third = (made.allocate(mib * MIB, 0) for mib in (10, 50, 60))
    made.free(second)  # from 10 to 60 MiB: of its pages those from 20 on
    assert made.segments.reserved == 120 * MIB
    other = made.allocate(40 * MIB, 1)
    assert (made.segments.reserved, made.retries) == (120 * MIB, 1)
    made.free(other)
    assert made.allocate(30 * MIB, 0).address == second.address
    assert (made.segments.reserved, made.retries) == (100 * MIB, 2), "one page more, and all of the other stream's less"
    assert made.allocate(20 * MIB, 0).address == second.address + 30 * MIB
    assert (made.active, made.segments.reserved) == (120 * MIB, 120 * MIB)
    with pytest.raises(OutOfMemory):
        made.allocate(1, 0)
    assert (first.size, third.address) == (10 * MIB, second.address + 50 * MIB)


def pools(live: list[MemoryBlock]) -> set[BlockPool]:
    return {block.pool for block in live}


def all_mapped(known: set[BlockPool], live: list[MemoryBlock]) -> int:
    """Return the bytes of all blocks of these pools, in use or free."""
    return sum(block.size for block in live) + sum(block.size for pool in known for _, _, block in pool.free)


@pytest.mark.parametrize("expandable", [FIXED, EXPANDABLE])
@pytest.mark.parametrize("capacity", [None, 700 * MIB, 400 * MIB])
def test_invariants_hold_under_random_requests(expandable: bool, capacity: int | None) -> None:
    """Blocks do not overlap, the counts are right, the capacity holds, and in the end everything can be released."""
    random = Random(0)
    made = allocator(expandable, capacity)
    live: list[MemoryBlock] = []
    known: set[BlockPool] = set()
    failed = 0
    for i in range(3000):
        if live and random.random() < (0.6 if len(live) > 60 else 0.4):
            made.free(live.pop(random.randrange(len(live))))
        else:
            nbytes = int(2 ** random.uniform(6, 26))
            try:
                live.append(made.allocate(nbytes, random.choice((0, 0, 1))))
                assert live[-1].size >= nbytes
            except OutOfMemory:
                failed += 1
                made.free(live.pop(random.randrange(len(live))))
        known |= pools(live)
        assert made.active == sum(block.size for block in live)
        assert made.segments.reserved == all_mapped(known, live)
        assert capacity is None or made.segments.peak <= capacity
        if i % 100 == 0:
            taken = sorted((block.address, block.address + block.size) for block in live)
            taken += [(b.address, b.address + b.size) for pool in known for _, _, b in pool.free]
            assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(taken)))
    assert (failed > 0) == (capacity == 400 * MIB)
    assert (made.retries > 0) == (capacity is not None)
    for block in live:
        made.free(block)
    made.empty_cache()
    assert (made.active, made.segments.reserved) == (0, 0)
    assert all_mapped(known, []) == 0
    assert not any(pool.unmapped for pool in known), "the expandable segments are gone"

"""The model of the CUDA caching allocator: each rule by hand, and invariants under random requests."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from meshrunner.runner.predict.allocator.alloc_conf import AllocatorSettings
from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator, OutOfMemory
from meshrunner.runner.predict.allocator.segments import MIB, BlockPool, MemoryBlock

DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)
EACH = (
    DEFAULT,
    EXPANDABLE,
    AllocatorSettings(max_split_size=32 * MIB),
    AllocatorSettings(expandable_segments=True, max_split_size=32 * MIB),
    AllocatorSettings(roundup_power2_divisions=4),
)


def allocator(settings: AllocatorSettings = DEFAULT, capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity, settings)


@pytest.mark.parametrize(
    ("nbytes", "divisions", "size"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (MIB + 1, 0, MIB + 512),
        (1200, 4, 1536),  # below 512 bytes per division, sizes are multiples of 512
        (2100, 4, 2560),
        (5 * MIB + 1, 4, 6 * MIB),
        (5 * MIB, 4, 5 * MIB),
        (5 * MIB + 1, 1, 5 * MIB + 512),
        (8 * MIB, 4, 8 * MIB),
        (7 * MIB + 1, 4, 8 * MIB),
    ],
)
def test_sizes_are_rounded(nbytes: int, divisions: int, size: int) -> None:
    made = allocator(AllocatorSettings(roundup_power2_divisions=divisions))
    made.allocate(nbytes, 0)
    assert made.active == size


def test_settings_are_read_as_torch_reads_them() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings.parse(" backend:native, ") == DEFAULT
    found = AllocatorSettings.parse(
        "expandable_segments:True, max_split_size_mb:64,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],backend:cudaMallocAsync"
    )
    assert found == AllocatorSettings(
        expandable_segments=True,
        max_split_size=64 * MIB,
        ignored=(
            "garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            "backend:cudaMallocAsync",
        ),
    )
    found = AllocatorSettings.parse("roundup_power2_divisions:4,max_non_split_rounding_mb:30,large_segment_size_mb:24")
    assert found == AllocatorSettings(False, None, 24 * MIB, 4, ("max_non_split_rounding_mb:30",))


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:true",
        "max_split_size_mb:19",
        "max_split_size_mb:",
        "max_split_size_mb:39,large_segment_size_mb:40",
        "large_segment_size_mb:10",
        "roundup_power2_divisions:3",
    ],
)
def test_settings_that_torch_refuses_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=text.split(":")[0]):
        AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    ("settings", "nbytes", "mib"),
    [
        (DEFAULT, 1, 2),
        (DEFAULT, MIB, 2),
        (DEFAULT, MIB + 1, 20),
        (DEFAULT, 10 * MIB - 512, 20),
        (DEFAULT, 10 * MIB, 10),
        (DEFAULT, 10 * MIB + 1, 12),
        (AllocatorSettings(large_segment_size=24 * MIB), 9 * MIB, 24),
        (EXPANDABLE, 1, 2),
        (EXPANDABLE, MIB + 1, 20),
        (EXPANDABLE, 20 * MIB + 1, 40),
    ],
)
def test_size_of_a_new_segment(settings: AllocatorSettings, nbytes: int, mib: int) -> None:
    made = allocator(settings)
    made.allocate(nbytes, 0)
    assert made.reserved == made.peak_reserved == mib * MIB


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE])
def test_streams_and_pools_share_nothing(settings: AllocatorSettings) -> None:
    made = allocator(settings)
    made.free(made.allocate(2 * MIB, 0))
    made.allocate(2 * MIB, 0)
    assert made.reserved == 20 * MIB
    made.allocate(2 * MIB, 1)
    assert made.reserved == 40 * MIB
    made.allocate(1, 0)
    assert made.reserved == 42 * MIB


def test_best_fit_takes_the_lowest_of_equal_blocks() -> None:
    made = allocator()
    blocks = [made.allocate(mib * MIB, 0) for mib in (14, 12, 10, 12)]  # each a segment
    for block in blocks:
        made.free(block)
    assert made.allocate(11 * MIB, 0).address == blocks[1].address
    assert made.allocate(11 * MIB, 0).address == blocks[3].address
    assert made.allocate(11 * MIB, 0).address == blocks[0].address
    assert made.reserved == 48 * MIB


def test_remainder_is_split_off() -> None:
    """A small block is split from 512 bytes on, a large one if more than 1 MiB is left over."""
    made = allocator()
    made.allocate(MIB, 0)
    assert made.allocate(MIB - 512, 0).size == MIB - 512
    assert made.allocate(512, 0).size == 512
    assert made.reserved == 2 * MIB
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
    assert made.reserved == 40 * MIB, "two free pieces with another between them"
    made.free(second)
    assert made.allocate(15 * MIB, 0).address == first.address
    assert made.reserved == 40 * MIB


def test_oversize_blocks_are_never_split() -> None:
    """Blocks of at least max_split_size only serve requests of nearly their size."""
    made = allocator(AllocatorSettings(max_split_size=32 * MIB))
    large = made.allocate(60 * MIB, 0)
    made.free(large)
    assert made.allocate(31 * MIB, 0).address != large.address
    assert made.reserved == 92 * MIB
    assert made.allocate(40 * MIB, 0).address != large.address, "the block is 20 MiB too large"
    assert made.reserved == 132 * MIB
    assert made.allocate(40 * MIB + 512, 0).address == large.address
    assert made.reserved == 132 * MIB
    assert made.active == (32 + 40 + 60) * MIB, "no block was split"


def test_cache_is_flushed_at_the_capacity() -> None:
    made = allocator(capacity=64 * MIB)
    whole, partly, rest = (made.allocate(mib * MIB, 0) for mib in (30, 5, 12))
    assert (made.reserved, made.retries) == (50 * MIB, 0)
    made.free(whole)
    made.free(rest)  # shares its segment
    made.allocate(40 * MIB, 1)
    assert (made.reserved, made.retries) == (60 * MIB, 1)
    assert made.peak_reserved == 60 * MIB
    with pytest.raises(OutOfMemory) as error:
        made.allocate(25 * MIB, 0)
    assert (error.value.requested, error.value.active, error.value.reserved) == (25 * MIB, 45 * MIB, 60 * MIB)
    assert made.retries == 2
    made.free(partly)
    made.allocate(24 * MIB, 0)
    assert (made.reserved, made.retries) == (64 * MIB, 3)


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE])
def test_blocks_that_wait_for_the_device_are_freed_before_the_cache_is_flushed(settings: AllocatorSettings) -> None:
    made = allocator(settings, capacity=60 * MIB)
    waiting = [made.allocate(40 * MIB, 0)]
    made.synchronize = lambda: made.free(waiting.pop())
    made.allocate(20 * MIB, 1)
    assert waiting
    made.allocate(21 * MIB, 1)
    assert not waiting
    assert (made.active, made.retries) == (pytest.approx(41 * MIB, abs=MIB), 1)


@pytest.mark.parametrize(
    ("mib", "reserved"), [(31, 50 + 80 + 32), (45, 40 + 50 + 80), (55, 40 + 50 + 56), (100, 40 + 100)]
)
def test_oversize_blocks_are_released_first(mib: int, reserved: int) -> None:
    """Either one that is large enough is released or the largest ones, without waiting for the device."""
    made = allocator(AllocatorSettings(max_split_size=32 * MIB), capacity=200 * MIB)
    for block in [made.allocate(each * MIB, 0) for each in (40, 50, 80)]:
        made.free(block)
    made.synchronize = pytest.fail
    made.allocate(mib * MIB, 0)
    assert (made.reserved, made.retries) == (reserved * MIB, 0)


def test_expandable_segments_grow() -> None:
    """The last block of a segment and new pages together serve a request that would otherwise need its own segment."""
    made = allocator(EXPANDABLE)
    first, second = made.allocate(30 * MIB, 0), made.allocate(30 * MIB, 0)
    assert made.reserved == 60 * MIB
    made.free(second)
    third = made.allocate(45 * MIB, 0)
    assert third.address == second.address
    assert (made.active, made.reserved) == (75 * MIB, 80 * MIB)
    made.free(first)
    assert made.allocate(5 * MIB, 0).address == first.address, "a hole before the segment's end, which can grow"


def test_expandable_segments_shrink_at_the_capacity() -> None:
    """Pages that are free as a whole are unmapped. A later request fills such gaps first."""
    made = allocator(EXPANDABLE, capacity=120 * MIB)
    first, second, third = (made.allocate(mib * MIB, 0) for mib in (10, 50, 60))
    made.free(second)  # from 10 to 60 MiB: of its pages those from 20 on
    assert made.reserved == 120 * MIB
    other = made.allocate(40 * MIB, 1)
    assert (made.reserved, made.retries) == (120 * MIB, 1)
    made.free(other)
    assert made.allocate(30 * MIB, 0).address == second.address
    assert (made.reserved, made.retries) == (100 * MIB, 2), "one page more, and all of the other stream's less"
    assert made.allocate(20 * MIB, 0).address == second.address + 30 * MIB
    assert (made.active, made.reserved) == (120 * MIB, 120 * MIB)
    with pytest.raises(OutOfMemory):
        made.allocate(1, 0)
    assert (first.size, third.address) == (10 * MIB, second.address + 50 * MIB)


def pools(live: list[MemoryBlock]) -> set[BlockPool]:
    return {block.pool for block in live}


def all_mapped(known: set[BlockPool], live: list[MemoryBlock]) -> int:
    """Return the bytes of all blocks of these pools, in use or free."""
    return sum(block.size for block in live) + sum(block.size for pool in known for block in pool.free_blocks())


@pytest.mark.parametrize("settings", EACH)
@pytest.mark.parametrize("capacity", [None, 700 * MIB, 400 * MIB])
def test_invariants_hold_under_random_requests(settings: AllocatorSettings, capacity: int | None) -> None:
    """Blocks do not overlap, the counts are right, the capacity holds, and in the end everything can be released."""
    random = Random(0)
    made = allocator(settings, capacity)
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
        assert made.reserved == all_mapped(known, live)
        assert capacity is None or made.peak_reserved <= capacity
        if i % 100 == 0:
            taken = sorted((block.address, block.address + block.size) for block in live)
            taken += [(b.address, b.address + b.size) for pool in known for b in pool.free_blocks()]
            assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(taken)))
    assert (failed > 0) == (capacity == 400 * MIB)
    assert (made.retries > 0) == (capacity is not None)
    for block in live:
        made.free(block)
    made.empty_cache()
    assert (made.active, made.reserved) == (0, 0)
    assert all_mapped(known, []) == 0
    assert not any(pool.unmapped for pool in known), "the expandable segments are gone"


def test_reset_peaks_starts_from_the_current_state() -> None:
    made = allocator()
    made.free(made.allocate(30 * MIB, 0))
    kept = made.allocate(12 * MIB, 1)
    made.empty_cache()
    assert (made.peak_active, made.peak_reserved) == (30 * MIB, 42 * MIB)
    made.reset_peaks()
    assert (made.peak_active, made.peak_reserved) == (kept.size, 12 * MIB)

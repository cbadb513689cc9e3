"""The order of the sequences depends only on seed, epoch and block, not on the state of the cache or the reader."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from meshrunner.recipes.data import sequences as sequences_module
from meshrunner.recipes.data.base import DataSpec, Random
from meshrunner.recipes.data.sequences import PackedSequences
from meshrunner.recipes.data.token_cache import CacheEntry, PackProgress
from meshrunner.recipes.errors import ConfigError

L = 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path))


def fill(entry: CacheEntry, tokens: int, complete: bool, vocab: int = 60000) -> None:
    """Fill an entry with tokens 0, 1, 2, ..., so a row shows its position."""
    progress = PackProgress(tokens=tokens, vocab=vocab, complete=complete)
    entry.folder.mkdir(parents=True, exist_ok=True)
    content = np.arange(tokens).astype(progress.dtype).tobytes()
    entry.tokens.write_bytes(content)
    entry.write(PackProgress(tokens=tokens, vocab=vocab, complete=complete, crc=zlib.crc32(content)))


def opened(tokens: int, *, shuffle: int | None, complete: bool = True, seed: int = 0) -> PackedSequences:
    entry = CacheEntry({"test": [tokens, complete]})
    fill(entry, tokens, complete)
    return PackedSequences(entry, DataSpec(60000, L, seed), shuffle)


def ids(sequences: PackedSequences, first: int, count: int) -> list[int]:
    return [int(row[0]) // L for row in sequences.rows(first, count)]


def test_a_row_is_seq_len_tokens_and_the_next() -> None:
    rows = opened(L * 20 + 1, shuffle=1).rows(0, 20)
    assert rows.dtype == np.int64 and rows.shape == (20, L + 1)
    assert (rows == np.arange(20)[:, None] * L + np.arange(L + 1)).all()


@pytest.mark.parametrize("shuffle", [None, 1, 6, 7, 1000])
def test_every_epoch_holds_every_sequence_once(shuffle: int | None) -> None:
    sequences = opened(L * 20 + 5, shuffle=shuffle)
    epochs = [ids(sequences, epoch * 20, 20) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert (epochs[0] != epochs[1]) == (shuffle != 1)
    assert ids(sequences, 13, 30) == (epochs[0] + epochs[1] + epochs[2])[13:43]  # across the ends of epochs and blocks


def test_blocks_stay_in_the_order_of_the_stream() -> None:
    order = ids(opened(L * 20 + 1, shuffle=6), 0, 20)
    assert [sorted(order[start : start + 6]) for start in (0, 6, 12, 18)] == [
        list(range(start, min(start + 6, 20))) for start in (0, 6, 12, 18)
    ]


def test_the_seed_decides() -> None:
    first, again, other = (ids(opened(L * 50 + 1, shuffle=None, seed=seed), 0, 50) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("cached", [6, 7, 11, 12, 19, 20])
def test_the_order_does_not_depend_on_how_much_is_cached(cached: int) -> None:
    whole = ids(opened(L * 20 + 1, shuffle=6), 0, 20)
    partly = opened(L * cached + 1, shuffle=6, complete=False)
    there = cached // 6 * 6
    assert ids(partly, 0, there) == whole[:there]
    fill(partly.entry, L * 20 + 1, complete=True)
    assert ids(partly, 0, 20) == whole and ids(partly, 20, 20) == ids(opened(L * 20 + 1, shuffle=6), 20, 20)


def test_readers_wait_for_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences_module, "PROGRESS_POLL_S", 0.001)
    monkeypatch.setattr(sequences_module, "PRODUCER_TIMEOUT_S", 0.01)  # no matter while the producer lives
    sequences = opened(L * 11 + 1, shuffle=6, complete=False)
    got: list[list[int]] = []
    reader = threading.Thread(target=lambda: got.append(ids(sequences, 6, 6)), daemon=True)
    with sequences.entry.lock():  # a producer at work
        reader.start()
        reader.join(0.05)
        assert reader.is_alive() and not got
        fill(sequences.entry, L * 12 + 1, complete=False)
        reader.join(5)
    assert got == [ids(opened(L * 20 + 1, shuffle=6), 6, 6)]


def test_readers_of_a_dead_producer_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences_module, "PRODUCER_TIMEOUT_S", 0.02)
    monkeypatch.setattr(sequences_module, "PROGRESS_POLL_S", 0.001)
    with pytest.raises(RuntimeError, match="only 9 tokens are cached, and no process is packing more"):
        opened(L + 1, shuffle=6, complete=False).rows(0, 1)
    with pytest.raises(RuntimeError, match="no process is packing more"):  # null waits for the end
        opened(L * 6 + 1, shuffle=None, complete=False).rows(0, 1)


def test_readers_see_what_the_producer_recorded() -> None:
    sequences = opened(L + 1, shuffle=6, complete=False)
    sequences.entry.write(PackProgress(tokens=L + 1, vocab=9, error="data.path: 'x' line 3 is not JSON"))
    with pytest.raises(RuntimeError, match="'x' line 3 is not JSON"):
        sequences.rows(0, 1)


def test_seq_len_longer_than_the_data() -> None:
    assert ids(opened(L + 1, shuffle=4), 0, 3) == [0, 0, 0]
    with pytest.raises(ConfigError, match=r"seq_len\(8\) \+ 1 is more than the 8 tokens of the data"):
        opened(L, shuffle=4).rows(0, 1)


def test_large_vocabularies_take_four_bytes() -> None:
    entry = CacheEntry({"wide": True})
    fill(entry, 70001, complete=True, vocab=70000)
    assert entry.tokens.stat().st_size == 4 * 70001
    assert PackedSequences(entry, DataSpec(70000, 70000, 0), None).rows(0, 1)[0, -1] == 70000
    assert [PackProgress(vocab=vocab).itemsize for vocab in (65536, 65537)] == [2, 4]


def test_random_tokens() -> None:
    spec = DataSpec(100, 16, 3)
    assert Random(kind="random").prepare(spec) is False
    rows = Random(kind="random").open(spec).rows(5, 40)
    assert rows.shape == (40, 17) and rows.dtype == np.int64 and rows.min() >= 0 and 90 < rows.max() < 100
    assert (Random(kind="random").open(spec).rows(7, 2) == rows[2:4]).all()
    assert (Random(kind="random").open(DataSpec(100, 16, 4)).rows(5, 40) != rows).mean() > 0.9
    assert len(np.unique(rows, axis=0)) == 40

"""Token sequences from the cache, in an order that depends only on the seed."""

import hashlib
import sys
import time
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.token_cache import CacheEntry, PackProgress, check_length, sequence_count

HASHED_TOKENS = 1 << 20
"""Maximum number of tokens that `beginning_hash` covers, counted from the beginning of the data."""
PROGRESS_POLL_S = 0.05
PRODUCER_TIMEOUT_S = 10.0
"""Seconds that a reader waits for missing tokens while no process is packing. Afterwards, the reader raises an error."""


class PackedSequences:
    """Shuffled sequences of a cache entry. An epoch is one pass over all data. Each epoch shuffles each block's sequences anew.

    With S = `shuffle`, block b holds sequences b * S to b * S + S - 1, shuffled by (seed, epoch, b). If `shuffle` is None, all
    data is one block. A block is available when its tokens are packed. Before shuffling, sequence k is
    tokens[k * L : k * L + L + 1] with L = seq_len. The second epoch cannot begin before all data is packed.
    """

    def __init__(self, entry: CacheEntry, spec: DataSpec, shuffle: int | None, *, separate: bool = False) -> None:
        """separate: whether attention is limited to single documents. If so, `describe` reports their mean length."""
        self.entry = entry
        self.spec = spec
        self.shuffle, self.separate = shuffle, separate
        self._progress = PackProgress()
        self._tokens: NDArray[np.unsignedinteger[Any]] = np.empty(0, np.uint16)

        @lru_cache(maxsize=4)
        def permutation(epoch: int, block: int, size: int) -> NDArray[np.int64]:
            return np.random.default_rng([spec.seed % 2**64, epoch, block]).permutation(size)

        self._permutation = permutation

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        length = self.spec.seq_len
        rows = np.empty((count, length + 1), dtype=np.int64)
        for row, index in zip(rows, range(first, first + count), strict=True):
            start = self._position(index) * length
            row[:] = self._tokens[start : start + length + 1]
        return rows

    def describe(self) -> dict[str, Any]:
        progress = self.entry.read() or self._progress
        # Hash only tokens that are always available when a run begins.
        block = progress.tokens if self.shuffle is None else self.shuffle * self.spec.seq_len + 1
        with self.entry.tokens.open("rb") as file:
            size = min(progress.tokens, block, HASHED_TOKENS) * progress.itemsize
            beginning = file.read(size)
        described = {
            "corpus_hash": progress.corpus,
            "beginning_hash": hashlib.blake2b(beginning, digest_size=16).hexdigest(),
            "tokens": progress.tokens,
            "documents": progress.documents,
            "empty_documents": progress.empty,
            "complete": progress.complete,
            "sequences": sequence_count(progress.tokens, self.spec.seq_len) if progress.complete else None,
            "tokenizer_hash": progress.tokenizer,
            "tokenizer_vocab": progress.vocab,
            "shuffle": self.shuffle,
        }
        if self.separate:
            tokens = np.frombuffer(beginning, progress.dtype)
            described["document_length"] = mean_length(tokens, self.entry.document_end(), self.spec.seq_len)
        return described

    def _position(self, index: int) -> int:
        """Wait for the block of sequence `index` (counted over all epochs) and return the sequence's number before shuffling."""
        length, size = self.spec.seq_len, self.shuffle
        if not self._progress.complete:
            needed = None if size is None else (index // size + 1) * size * length + 1
            if needed is None or needed > len(self._tokens):
                self._wait(needed)
        # Until all data is packed, the first epoch has no known end.
        n = sequence_count(len(self._tokens), length) if self._progress.complete else sys.maxsize
        epoch, index = divmod(index, n)
        size = min(size or n, n)
        start = index // size * size
        return start + int(self._permutation(epoch, index // size, min(size, n - start))[index - start])

    def _wait(self, tokens: int | None) -> None:
        """Wait until `tokens` tokens (None: all) are packed, then map tokens.bin. Raises RuntimeError if packing has stopped."""
        idle_since: float | None = None
        while True:
            produced = self.entry.is_locked()  # check first, because a producer writes its last record before unlocking
            progress = self.entry.read() or PackProgress()
            if progress.complete or (tokens is not None and progress.tokens >= tokens):
                break
            if progress.error and not produced:
                raise RuntimeError(progress.error)
            idle_since = None if produced else idle_since or time.monotonic()
            if idle_since is not None and time.monotonic() - idle_since > PRODUCER_TIMEOUT_S:
                raise RuntimeError(
                    f"data: only {progress.tokens:,} tokens are cached, and no process is packing more. The packing "
                    f"process died, or the files in data.path have changed (cache entry {self.entry.folder}); "
                    "start the run again"
                )
            time.sleep(PROGRESS_POLL_S)
        check_length(progress, self.spec)
        self._progress = progress
        self._tokens = np.memmap(self.entry.tokens, dtype=progress.dtype, mode="r", shape=(progress.tokens,))


def mean_length(tokens: NDArray[np.unsignedinteger[Any]], end: int, seq_len: int) -> float:
    """Return the mean length of a token's document, averaged over all tokens. A document that continues in the next sequence
    counts as two documents. end: the token that ends each document."""
    length = min(seq_len, len(tokens))
    tokens = tokens[: len(tokens) // length * length]
    places = np.arange(1, len(tokens) + 1)
    lengths = np.diff(places[(tokens == end) | (places % length == 0)], prepend=0)
    return float((lengths**2).sum() / len(tokens))

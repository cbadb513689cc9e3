"""Sequences out of packed tokens, in an order that depends on nothing but the seed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.token_cache import CacheEntry, PackProgress, check_length, whole_sequences

POLL_S = 0.05
DEAD_S = 10.0
"""How long nobody may hold an incomplete entry's lock until its readers give up."""


class PackedSequences:
    """
    Sequence i of an epoch of n is `tokens[k * L : k * L + L + 1]`, with L = seq_len and k the i-th of a permutation.

    It permutes blocks: sequences b * S .. b * S + S - 1 of the stream trade places with each other only, by (seed,
    epoch, b). So a block can be handed out as soon as its tokens are there, and what it holds does not depend on how
    much more is. The epoch ends where the data does; until that is known, there is only the first epoch.
    """

    def __init__(self, entry: CacheEntry, spec: DataSpec, shuffle: int | None) -> None:
        """
        Args:
            shuffle: S, sequences per block; None: all of them, which must wait for the end of the data.
        """
        self.entry = entry
        self.spec = spec
        self.shuffle = shuffle
        self._progress = PackProgress()
        self._tokens: NDArray[np.unsignedinteger[Any]] = np.empty(0, np.uint16)
        self._order = lru_cache(maxsize=4)(self._permutation)

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        length = self.spec.seq_len
        rows = np.empty((count, length + 1), dtype=np.int64)
        for row, index in zip(rows, range(first, first + count), strict=True):
            start = self._place(index) * length
            row[:] = self._tokens[start : start + length + 1]
        return rows

    def describe(self) -> dict[str, Any]:
        progress = self.entry.read() or self._progress
        return {
            "corpus_hash": progress.corpus,
            "tokens": progress.tokens,
            "documents": progress.documents,
            "complete": progress.complete,
            "sequences": whole_sequences(progress.tokens, self.spec.seq_len) if progress.complete else None,
            "tokenizer_hash": progress.tokenizer,
            "tokenizer_vocab": progress.vocab,
            "shuffle": self.shuffle,
        }

    def _place(self, index: int) -> int:
        """Which sequence of the stream has a global index, once its block is there."""
        length, size = self.spec.seq_len, self.shuffle
        if not self._progress.complete:
            until = None if size is None else (index // size + 1) * size
            if until is None or until * length + 1 > len(self._tokens):
                self._wait(None if until is None else until * length + 1)
        if not self._progress.complete:
            assert size is not None
            return index // size * size + int(self._order(0, index // size, size)[index % size])
        n = whole_sequences(len(self._tokens), length)
        epoch, index = divmod(index, n)
        size = min(size or n, n)
        start = index // size * size
        return start + int(self._order(epoch, index // size, min(size, n - start))[index - start])

    def _permutation(self, epoch: int, block: int, size: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.spec.seed % 2**64, epoch, block]).permutation(size)

    def _wait(self, tokens: int | None) -> None:
        """Wait until so many tokens (None: all) are there; then map what is there."""
        for progress in progress_until_dead(self.entry):
            if progress.complete or (tokens is not None and progress.tokens >= tokens):
                break
        check_length(progress, self.spec.seq_len)
        self._progress = progress
        self._tokens = np.memmap(self.entry.tokens, dtype=progress.dtype, mode="r", shape=(progress.tokens,))


def progress_until_dead(entry: CacheEntry) -> Iterator[PackProgress]:
    """The record, again and again; raises RuntimeError when nobody continues it."""
    idle_since: float | None = None
    while True:
        produced = entry.is_written()  # asked before reading: who writes the last record holds the lock
        progress = entry.read() or PackProgress()
        yield progress
        if produced:
            idle_since = None
        elif progress.error:
            raise RuntimeError(progress.error)
        else:
            idle_since = idle_since or time.monotonic()
            if time.monotonic() - idle_since > DEAD_S:
                raise RuntimeError(
                    f"data: only {progress.tokens:,} tokens are in the cache and no process reads on: the producer "
                    f"died, or the files that data.path names were changed meanwhile (cache entry {entry.folder})"
                )
        time.sleep(POLL_S)

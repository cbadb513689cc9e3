"""Packing: tokenise documents and append the tokens to the cache. The work of a killed producer is resumed exactly."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from meshrunner.recipes.data.token_cache import CacheEntry, PackProgress

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

BATCH_CHARACTERS = 256_000
"""Characters tokenised in one batch."""
RECORD_INTERVAL_S = 0.5
"""Most seconds of work that a killed producer loses."""


class Documents(Protocol):
    """A source of texts with a resumable position."""

    def read(self, state: dict[str, Any]) -> Iterator[str]:
        """Return the texts from `state` on ({}: the start). Raises ConfigError if the source cannot be read."""

    def state(self) -> dict[str, Any]:
        """Return the position after the last text that was read, as JSON values."""


def pack(
    entry: CacheEntry, documents: Documents, tokenizer: SentencePieceProcessor, progress: PackProgress, threads: int
) -> PackProgress:
    """Tokenise and append the remaining documents, recording progress every half second. -1 threads: all cores."""
    import numpy as np

    with entry.tokens.open("r+b") as file:
        file.truncate(progress.tokens * progress.itemsize)  # drop what a killed producer wrote but did not record
        file.seek(0, 2)
        recorded = 0.0
        for texts in text_batches(documents.read(progress.state)):
            ids = tokenizer.encode(texts, add_eos=True, num_threads=threads)
            packed = np.fromiter(chain.from_iterable(ids), dtype=progress.dtype).tobytes()
            file.write(packed)
            progress = replace(
                progress,
                tokens=progress.tokens + len(packed) // progress.itemsize,
                documents=progress.documents + len(texts),
                corpus=_extend_hash(progress.corpus, texts),
                crc=zlib.crc32(packed, progress.crc),
            )
            if time.monotonic() - recorded > RECORD_INTERVAL_S:
                file.flush()
                progress = replace(progress, state=documents.state())
                entry.write(progress)
                recorded = time.monotonic()
    progress = replace(progress, state={}, complete=True)
    entry.write(progress)
    return progress


def text_batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Group non-empty texts into lists of about BATCH_CHARACTERS characters."""
    batch: list[str] = []
    size = 0
    for text in filter(None, texts):
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _extend_hash(corpus: str, texts: list[str]) -> str:
    """Extend the corpus hash by texts. It can be resumed in another process and does not depend on batches."""
    for text in texts:
        corpus = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16, key=corpus.encode()).hexdigest()
    return corpus

"""Documents -> tokens appended to the cache, so that a producer that is killed can be continued exactly."""

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

BATCH = 256_000
"""Characters tokenised at a time."""
RECORD_S = 0.5
"""What a killed producer loses at most."""


class Documents(Protocol):
    """A source of texts that knows where it is."""

    def read(self, state: dict[str, Any]) -> Iterator[str]:
        """The texts from a state on ({}: the start); raises ConfigError when the source cannot be read."""

    def state(self) -> dict[str, Any]:
        """Where to read on after the text that was read last; JSON values only."""


def pack(
    entry: CacheEntry, documents: Documents, tokenizer: SentencePieceProcessor, progress: PackProgress, threads: int
) -> PackProgress:
    """Tokenise what is left of the documents and append it, recording every half second; -1 threads are all cores."""
    import numpy as np

    with entry.tokens.open("r+b") as file:
        file.truncate(progress.tokens * progress.itemsize)  # what a killed producer wrote without recording it
        file.seek(0, 2)
        recorded = 0.0
        for texts in batches(documents.read(progress.state)):
            ids = tokenizer.encode(texts, add_eos=True, num_threads=threads)
            packed = np.fromiter(chain.from_iterable(ids), dtype=progress.dtype).tobytes()
            file.write(packed)
            progress = replace(
                progress,
                tokens=progress.tokens + len(packed) // progress.itemsize,
                documents=progress.documents + len(texts),
                corpus=_chain(progress.corpus, texts),
                crc=zlib.crc32(packed, progress.crc),
            )
            if time.monotonic() - recorded > RECORD_S:
                file.flush()
                progress = replace(progress, state=documents.state())
                entry.write(progress)
                recorded = time.monotonic()
    progress = replace(progress, state={}, complete=True)
    entry.write(progress)
    return progress


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of texts of some BATCH characters each, without the empty ones."""
    batch: list[str] = []
    size = 0
    for text in filter(None, texts):
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _chain(corpus: str, texts: list[str]) -> str:
    """A hash that can be continued in another process, whatever the batches."""
    for text in texts:
        corpus = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16, key=corpus.encode()).hexdigest()
    return corpus

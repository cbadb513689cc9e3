"""`PackedText`, the base class of the options that tokenise documents and pack them into one stream of tokens in the cache."""

from __future__ import annotations

import hashlib
import time
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Self

from meshrunner.recipes.data import tokenizer as tokenizers
from meshrunner.recipes.data.base import Data, DataSpec, Sequences
from meshrunner.recipes.data.token_cache import CacheEntry, PackProgress, check_length
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import AutoCount, whole
from meshrunner.recipes.storage import replace_file

SAMPLE_CHARACTERS = 8_000_000
"""Approximate number of characters, from the beginning of the data, on which a tokenizer is trained. Training takes 1-2 s."""
BATCH_CHARACTERS = 256_000
HELD_OUT_CHARACTERS = 16_000
"""Like BATCH_CHARACTERS, but for held-out text. A batch fills slowly, because by default 1 of 200 documents is held out."""
RECORD_INTERVAL_S = 0.5
"""Seconds between two updates of progress.json. A killed packing process loses at most about this many seconds of work."""
Position = dict[str, Any]
"""Position from which to continue reading documents, as JSON values. {} is the start."""


class PackedText(Data):
    """Base class of the options that tokenise text."""

    background: ClassVar[bool] = True
    """Whether a separate process packs the text during training. If false, the text is packed before training starts."""

    tokenizer: str | None
    """A sentencepiece .model file, a tokenizer.json or its folder; null: train a BPE tokenizer on the text."""
    vocab_size: AutoCount
    """Vocabulary size to train if `tokenizer` is null; a short text may yield less. auto: model.vocab_size, at most 32000."""
    bos: bool = False
    """Whether to put the tokenizer's begin token before each document."""
    shuffle: Annotated[int | None, whole(None)]
    """Sequences per block. Each block is shuffled separately. 1: file order; null: one block with all data."""

    @abstractmethod
    def source(self) -> dict[str, Any]:
        """Return JSON values that identify the text without reading all of it. Raises ConfigError if the text is missing."""

    def read_documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield each document after `position`, with the position after that document. Raises ConfigError if a document is
        unreadable. A class without the key `documents` may call this method `documents`."""
        found: Iterator[tuple[str, Position]] = self.documents(position)  # type: ignore[attr-defined]
        return found

    def document_end(self, spec: DataSpec) -> int:
        return self.entry(spec).document_end()

    def no_text_message(self) -> str:
        return "data: the source contains no text; choose another source"

    def sample(self) -> Iterator[str]:
        """Yield the texts on which to train a tokenizer."""
        size = 0
        for text, _ in self.read_documents({}):
            yield text
            size += len(text)
            if size >= SAMPLE_CHARACTERS:
                return

    def prepare(self, spec: DataSpec) -> bool:
        entry = self.entry(spec)
        with entry.lock(wait=not self.background) as mine:
            progress = entry.verify() if mine else entry.read()
            if not self.background and (progress is None or not suffices(progress, spec)):
                progress = self._pack(entry, spec)
            elif mine and progress is not None and progress.error:
                progress = replace(progress, error="")  # let the next producer try again: the cause may be gone
                entry.write(progress)
        if progress is None:
            if self.tokenizer is not None:
                self._check_vocabulary(self.load_tokenizer(*self._model(spec)).vocab, spec)
            return True
        self._check_vocabulary(progress.vocab, spec)
        check_length(progress, spec)
        return not suffices(progress, spec)

    def produce(self, spec: DataSpec) -> None:
        entry = self.entry(spec)
        with entry.lock():
            try:
                self._pack(entry, spec)
            except Exception as error:
                why = str(error) if isinstance(error, ConfigError) else f"data: {type(error).__name__}: {error}"
                entry.write(replace(entry.read() or PackProgress(), error=why))
                raise

    def started(self, spec: DataSpec) -> bool:
        entry = self.entry(spec)
        written = entry.is_locked()  # check before reading, because a failure is recorded before the lock is released
        progress = entry.read()
        if progress is None:
            return False
        if progress.error and not written:
            raise ConfigError(progress.error)
        self._check_vocabulary(progress.vocab, spec)
        check_length(progress, spec)
        if spec.held_out is not None:
            return suffices(progress, spec)
        return progress.complete or (self.shuffle is not None and progress.tokens > self.shuffle * spec.seq_len)

    def for_evaluation(self, trained: Data, spec: DataSpec) -> Self:
        """Return a copy that uses the tokenizer and the value of `bos` of the training data, and does not shuffle sequences."""
        if not isinstance(trained, PackedText):
            raise ConfigError(f"eval.data: data={trained.kind} has no tokenizer; use eval.data=null")
        if self is not trained and self.tokenizer is not None:
            raise ConfigError("eval.data.tokenizer: evaluation uses `data`'s tokenizer; use eval.data.tokenizer=null")
        tokenizer = trained.tokenizer or str(trained.entry(spec).tokenizer)
        return self.model_copy(update={"tokenizer": tokenizer, "bos": trained.bos, "shuffle": 1})

    def open(self, spec: DataSpec) -> Sequences:
        from meshrunner.recipes.data.sequences import PackedSequences

        return PackedSequences(
            self.entry(spec), spec, self.shuffle, separate=self.separates_documents and spec.held_out is None
        )

    def entry(self, spec: DataSpec) -> CacheEntry:
        identity: dict[str, Any] = {"source": self.source()}
        if self.tokenizer is None:
            identity["train"] = self._vocabulary(spec)
            from importlib.metadata import version

            identity["sentencepiece"] = version("sentencepiece")
        else:
            identity["tokenizer"] = hashlib.sha256(tokenizers.read_model(self.tokenizer)).hexdigest()
        if self.bos:
            identity["bos"] = True
        if spec.share or spec.held_out is not None:
            identity["held_out" if spec.held_out is not None else "withheld"] = spec.share
        return CacheEntry(identity)

    def _documents(self, position: Position, spec: DataSpec) -> Iterator[tuple[str, Position]]:
        """Yield the documents to train on or, for an evaluation, the held-out documents."""
        for text, after in self.read_documents(position):
            if not spec.share or is_held_out(text, spec.share) == (spec.held_out is not None):
                yield text, after

    def _vocabulary(self, spec: DataSpec) -> int:
        if self.vocab_size == "auto":
            return min(spec.vocab_size, tokenizers.MAX_AUTO_VOCAB)
        self._check_vocabulary(self.vocab_size, spec)
        return self.vocab_size

    def _check_vocabulary(self, vocab: int, spec: DataSpec) -> None:
        if vocab > spec.vocab_size:
            key = "data.vocab_size" if self.tokenizer is None else "data.tokenizer"
            raise ConfigError(
                f"model.vocab_size({spec.vocab_size}) is smaller than the tokenizer's vocabulary of {vocab} tokens "
                f"({key}); raise model.vocab_size or choose a smaller tokenizer"
            )

    def _model(self, spec: DataSpec) -> tuple[bytes, str]:
        """Read or train the tokenizer's model. Return the bytes of the model, and the model's name for messages."""
        if self.tokenizer is not None:
            return tokenizers.read_model(self.tokenizer), f"data.tokenizer: '{self.tokenizer}'"
        first = next(texts := filter(None, self.sample()), None)
        if first is None:
            raise ConfigError(self.no_text_message())
        return tokenizers.train_tokenizer(chain([first], texts), self._vocabulary(spec)), "the trained tokenizer"

    def load_tokenizer(self, model: bytes, where: str) -> tokenizers.Tokenizer:
        """Load a tokenizer, and drop its begin token unless `bos` is set. Raise ConfigError if `bos` is set but the tokenizer has
        no begin token."""
        tokenizer = tokenizers.load_tokenizer(model, where)
        if self.bos and tokenizer.bos is None:
            raise ConfigError(f"data.bos: {where} has no begin token; use data.bos=false")
        return tokenizer if self.bos else tokenizer._replace(bos=None)

    def _pack(self, entry: CacheEntry, spec: DataSpec) -> PackProgress:
        """Pack all text that the cache entry still lacks. The caller holds the entry's lock."""
        progress = entry.verify(thorough=True)
        try:
            if progress is None or not progress.vocab:
                model, where = self._model(spec)
                vocab = self.load_tokenizer(model, where).vocab
                self._check_vocabulary(vocab, spec)
                replace_file(entry.tokenizer, model)
                entry.tokens.touch()
                progress = PackProgress(vocab=vocab, tokenizer=hashlib.sha256(model).hexdigest())
            progress = replace(progress, error="")
            entry.write(progress)
            if not suffices(progress, spec):
                tokenizer = self.load_tokenizer(entry.tokenizer.read_bytes(), str(entry.tokenizer))
                documents = self._documents(progress.state, spec)
                threads = 1 if self.background else -1
                progress = pack(entry, documents, tokenizer, progress, threads, spec)
        except OSError as error:
            raise ConfigError(
                f"cannot write to the cache entry {entry.folder} ({error.strerror}); set MESHRUNNER_CACHE to another directory"
            ) from None
        return progress


def pack(
    entry: CacheEntry,
    documents: Iterator[tuple[str, Position]],
    tokenizer: tokenizers.Tokenizer,
    progress: PackProgress,
    threads: int,
    spec: DataSpec,
) -> PackProgress:
    """Tokenise the remaining documents and append their tokens to the entry, until the tokens suffice. Put the begin token, if
    the tokenizer has one, before each document, and the end token after it. threads: number of threads; -1: all cores."""
    import numpy as np

    begin, end = [] if tokenizer.bos is None else [tokenizer.bos], [tokenizer.eos]
    with entry.tokens.open("r+b") as file:
        file.truncate(progress.tokens * progress.itemsize)  # drop tokens that a killed producer did not record
        file.seek(0, 2)
        recorded = 0.0
        for texts, empty, position in text_batches(
            documents, HELD_OUT_CHARACTERS if spec.held_out else BATCH_CHARACTERS
        ):
            ids = (part for document in tokenizer.encode(texts, threads) for part in (begin, document, end))
            packed = np.fromiter(chain.from_iterable(ids), dtype=progress.dtype).tobytes()
            file.write(packed)
            corpus = progress.corpus
            for text in texts:  # a chain of hashes can be resumed, and does not depend on the batches
                content = text.encode(errors="surrogatepass")
                corpus = hashlib.blake2b(content, digest_size=16, key=corpus.encode()).hexdigest()
            progress = replace(
                progress,
                tokens=progress.tokens + len(packed) // progress.itemsize,
                documents=progress.documents + len(texts),
                empty=progress.empty + empty,
                corpus=corpus,
                crc=zlib.crc32(packed, progress.crc),
            )
            enough = suffices(progress, spec)
            if enough or time.monotonic() - recorded > RECORD_INTERVAL_S:
                file.flush()
                progress = replace(progress, state=position)
                entry.write(progress)
                recorded = time.monotonic()
            if enough:
                return progress
    progress = replace(progress, state={}, complete=True)
    entry.write(progress)
    return progress


def suffices(progress: PackProgress, spec: DataSpec) -> bool:
    """Return whether the packed tokens are enough for a run."""
    return progress.complete or (spec.held_out is not None and progress.tokens > spec.held_out * spec.seq_len)


def is_held_out(text: str, share: float) -> bool:
    """Return whether a document belongs to the `share` of documents that are held out. Equal documents are treated alike."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def text_batches(
    documents: Iterator[tuple[str, Position]], characters: int
) -> Iterator[tuple[list[str], int, Position]]:
    """Yield (texts with about `characters` characters, number of skipped empty texts, position after the last text)."""
    batch: list[str] = []
    size = empty = 0
    position: Position = {}
    for text, position in documents:
        if text:
            batch.append(text)
            size += len(text)
        else:
            empty += 1
        if size >= characters:
            yield batch, empty, position
            batch, size, empty = [], 0, 0
    if batch or empty:
        yield batch, empty, position

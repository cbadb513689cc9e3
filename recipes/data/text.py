"""The base class of text options: documents -> tokenizer -> one packed stream of tokens in the cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar

from meshrunner.recipes.data import tokenizer as tokenizers
from meshrunner.recipes.data.base import Data, DataSpec, Sequences
from meshrunner.recipes.data.packing import Documents, pack
from meshrunner.recipes.data.token_cache import CacheEntry, PackProgress, check_length
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import AutoCount, whole
from meshrunner.recipes.storage.durable import replace_file

SAMPLE_CHARACTERS = 8_000_000
"""Characters at the beginning of the data that a tokenizer is trained on (1-2 s)."""


class PackedText(Data):
    """Base class of the options that tokenise text."""

    background: ClassVar[bool] = True
    """Whether a separate process packs the text during training, because packing is slow."""

    tokenizer: str | None
    """A sentencepiece .model file; null: train a BPE tokenizer on the text."""
    vocab_size: AutoCount
    """Vocabulary size of a trained tokenizer; auto: the model's, at most 32000. It can be smaller if the text yields less."""
    shuffle: Annotated[int | None, whole(None)]
    """Sequences per block, within which they are shuffled; 1: file order; null: one block of all data."""

    @abstractmethod
    def source(self) -> dict[str, Any]:
        """Return the identity of the text as JSON values, cheap to compute. Raises ConfigError if the text is missing."""

    @abstractmethod
    def documents(self) -> Documents:
        """Return the documents of the text."""

    def sample(self) -> Iterator[str]:
        """Yield the texts that a tokenizer is trained on."""
        size = 0
        for text in self.documents().read({}):
            yield text
            size += len(text)
            if size >= SAMPLE_CHARACTERS:
                return

    def prepare(self, spec: DataSpec) -> bool:
        entry = self.entry(spec)
        if not self.background:
            with entry.lock():
                progress = entry.verify()
                if progress is None or not progress.complete:
                    progress = self._pack(entry, spec)
        else:
            with entry.try_lock() as mine:
                progress = entry.verify() if mine else entry.read()
                if mine and progress is not None and progress.error:
                    progress = replace(
                        progress, error=""
                    )  # let the next producer try again, because the cause may be gone
                    entry.write(progress)
            if progress is None and self.tokenizer is not None:
                self._check_vocabulary(len(tokenizers.load_tokenizer(*self._given_tokenizer())), spec)
        if progress is None:
            return True
        self._check(progress, spec)
        return not progress.complete

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
        written = entry.is_locked()  # checked first, because a failure is recorded before the lock is released
        progress = entry.read()
        if progress is None:
            return False
        if progress.error and not written:
            raise ConfigError(progress.error)
        if progress.vocab:
            self._check(progress, spec)
        first_block = None if self.shuffle is None else self.shuffle * spec.seq_len + 1
        return progress.complete or (first_block is not None and progress.tokens >= first_block)

    def open(self, spec: DataSpec) -> Sequences:
        from meshrunner.recipes.data.sequences import PackedSequences

        return PackedSequences(self.entry(spec), spec, self.shuffle)

    def entry(self, spec: DataSpec) -> CacheEntry:
        """Return the cache entry of this text with this tokenizer."""
        identity: dict[str, Any] = {"source": self.source()}
        if self.tokenizer is None:
            identity["train"] = self._vocabulary(spec)
            identity["sentencepiece"] = importlib.metadata.version("sentencepiece")
        else:
            identity["tokenizer"] = hashlib.sha256(tokenizers.read_model(self.tokenizer)).hexdigest()
        return CacheEntry(identity)

    def _vocabulary(self, spec: DataSpec) -> int:
        """Return the vocabulary size of the tokenizer to train."""
        if self.vocab_size == "auto":
            return min(spec.vocab_size, tokenizers.MAX_AUTO_VOCAB)
        self._check_vocabulary(self.vocab_size, spec)
        return self.vocab_size

    def _given_tokenizer(self) -> tuple[bytes, str]:
        assert self.tokenizer is not None
        return tokenizers.read_model(self.tokenizer), f"data.tokenizer: '{self.tokenizer}'"

    def _check_vocabulary(self, vocab: int, spec: DataSpec) -> None:
        if vocab > spec.vocab_size:
            key = "data.vocab_size" if self.tokenizer is None else "data.tokenizer"
            raise ConfigError(
                f"model.vocab_size({spec.vocab_size}) is smaller than the tokenizer's vocabulary, {key}({vocab}); "
                "raise model.vocab_size or choose a smaller tokenizer"
            )

    def _check(self, progress: PackProgress, spec: DataSpec) -> None:
        self._check_vocabulary(progress.vocab, spec)
        check_length(progress, spec.seq_len)

    def _pack(self, entry: CacheEntry, spec: DataSpec) -> PackProgress:
        """Complete the cache entry. The caller holds its lock."""
        progress = entry.verify(thorough=True)
        try:
            if progress is None or not progress.vocab:
                model, where = (
                    self._given_tokenizer() if self.tokenizer else (self._train(spec), "the trained tokenizer")
                )
                vocab = len(tokenizers.load_tokenizer(model, where))
                self._check_vocabulary(vocab, spec)
                replace_file(entry.tokenizer, model)
                entry.tokens.touch()
                progress = PackProgress(vocab=vocab, tokenizer=hashlib.sha256(model).hexdigest())
            progress = replace(progress, error="")
            entry.write(progress)
            if not progress.complete:
                tokenizer = tokenizers.load_tokenizer(entry.tokenizer.read_bytes(), str(entry.tokenizer))
                progress = pack(entry, self.documents(), tokenizer, progress, 1 if self.background else -1)
        except OSError as error:
            raise ConfigError(f"cannot write to the cache entry {entry.folder} ({error.strerror})") from None
        return progress

    def _train(self, spec: DataSpec) -> bytes:
        first = next(texts := filter(None, self.sample()), None)
        if first is None:
            raise ConfigError(self.no_text_message())
        return tokenizers.train_tokenizer(chain([first], texts), self._vocabulary(spec))

    def no_text_message(self) -> str:
        """Return the error message for a source without text."""
        return "data: the source contains no text; choose another"

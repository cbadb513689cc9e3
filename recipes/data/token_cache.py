"""One entry of the token cache: a folder with a tokenizer, the packed tokens and a record of how far they go.

    tokenizer.model   sentencepiece
    tokens.bin        documents joined with the end-of-sentence token, little-endian uint16 or uint32, append-only
    progress.json     how much of tokens.bin counts, checksums, where to read on; replaced atomically, after tokens.bin
    .lock             held (flock) by the one process that writes here

Whatever lies in tokens.bin behind the recorded number of tokens does not count, so that a writer may be killed at any
time. Nothing here is ever deleted for age: the folder may be removed by hand when nothing runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from meshrunner.recipes.cache_dir import cache_dir
from meshrunner.recipes.durable import checksum, replace_file
from meshrunner.recipes.errors import ConfigError

FORMAT = 1
"""Part of every entry's key: raised when the same source would be packed in another way."""
CHECKED_BYTES = 64 << 20
"""tokens.bin is read through by `verify` up to this size (30 ms); a longer one when a producer continues it."""


@dataclass(frozen=True)
class PackProgress:
    """What progress.json says."""

    tokens: int = 0
    documents: int = 0
    complete: bool = False
    """The end of the data is reached; only then is the length of an epoch known."""
    error: str = ""
    """Why the last producer gave up, for the user."""
    vocab: int = 0
    """The tokenizer's."""
    tokenizer: str = ""
    """SHA-256 of tokenizer.model."""
    corpus: str = ""
    """Hash over the documents so far, each hashed together with the hash before it."""
    crc: int = 0
    """CRC-32 of the tokens so far: one that can be continued."""
    state: dict[str, Any] = field(default_factory=dict)
    """Where the source is to be read on; {} from the start."""

    @property
    def itemsize(self) -> int:
        """Bytes per token in tokens.bin."""
        return 2 if self.vocab <= 1 << 16 else 4

    @property
    def dtype(self) -> str:
        """numpy's name for a token in tokens.bin."""
        return f"<u{self.itemsize}"


class CacheEntry:
    """The entry of one (source, tokenizer); nothing is made before something is written."""

    def __init__(self, identity: dict[str, Any]) -> None:
        """
        Args:
            identity: everything that decides the packed tokens; JSON values only.
        """
        text = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
        self.folder = cache_dir() / "tokens" / hashlib.sha256(text.encode()).hexdigest()[:20]
        self.tokenizer = self.folder / "tokenizer.model"
        self.tokens = self.folder / "tokens.bin"
        self._progress = self.folder / "progress.json"

    def read(self) -> PackProgress | None:
        """The record; None where there is none or it is damaged."""
        try:
            value = json.loads(self._progress.read_bytes())
            if value.pop("checksum") != _checksum(value):
                return None
            return PackProgress(**value)
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, progress: PackProgress) -> None:
        """Replace the record. What it counts must have been written to tokens.bin before."""
        value = asdict(progress)
        replace_file(self._progress, json.dumps(value | {"checksum": _checksum(value)}).encode())

    def verify(self, thorough: bool = False) -> PackProgress | None:
        """
        The record, if the files are what it says; else None, and the entry is emptied. Only for who holds the lock.

        Args:
            thorough: compare the checksum of the tokens whatever their size.
        """
        progress = self.read()
        if progress is not None and self._intact(progress, thorough):
            return progress
        for path in (self._progress, self.tokens, self.tokenizer):  # a reader that has mapped the tokens keeps them
            path.unlink(missing_ok=True)
        return None

    def _intact(self, progress: PackProgress, thorough: bool) -> bool:
        try:
            if hashlib.sha256(self.tokenizer.read_bytes()).hexdigest() != progress.tokenizer:
                return False
            size = progress.tokens * progress.itemsize
            if self.tokens.stat().st_size < size:
                return False
            return (size > CHECKED_BYTES and not thorough) or checksum(self.tokens, size)[1] == progress.crc
        except FileNotFoundError:
            return False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one writer; waits for the one there is. The system frees the lock when its holder dies."""
        with self._lock_file() as file:
            _flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def lock_if_free(self) -> Iterator[bool]:
        """Be the one writer, unless there is one: then False."""
        with self._lock_file() as file:
            for _ in range(5):  # `is_written` of another process holds it for microseconds
                if held := _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    break
                time.sleep(0.005)
            yield held

    def is_written(self) -> bool:
        """Whether some process holds the lock."""
        if not self.folder.is_dir():
            return False
        with self._lock_file() as file:
            return not _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @contextmanager
    def _lock_file(self) -> Iterator[int]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"the cache entry {self.folder} cannot be written ({error.strerror})") from None
        try:
            yield file
        finally:
            os.close(file)


def whole_sequences(tokens: int, seq_len: int) -> int:
    """How many sequences a number of tokens holds; the last target of one is the first token of the next."""
    return max(0, (tokens - 1) // seq_len)


def check_length(progress: PackProgress, seq_len: int) -> None:
    """Raise ConfigError when the whole data is shorter than one sequence."""
    if progress.complete and whole_sequences(progress.tokens, seq_len) == 0:
        raise ConfigError(
            f"seq_len({seq_len}) + 1 is more than the {progress.tokens} tokens the data has; lower seq_len or choose "
            "more data"
        )


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _flock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        raise ConfigError(
            f"the cache folder cannot be locked ({error.strerror}); name another in MESHRUNNER_CACHE"
        ) from None
    return True

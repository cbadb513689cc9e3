"""The token cache. Each entry is a directory with a tokenizer, packed tokens and a progress record.

    tokenizer.model   sentencepiece model, or JSON (see `tokenizer`)
    tokens.bin        documents, each with its begin token (if any) and end token, little-endian uint16 or uint32, append-only
    progress.json     valid length of tokens.bin, checksums, position in the source; replaced atomically, after tokens.bin
    .lock             locked (flock) by the one process that writes the entry

Tokens beyond the length in progress.json are ignored, so a writer can be killed at any time. Cache entries never expire.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.tokenizer import load_tokenizer
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import cache_dir, checksum, replace_file

FORMAT = 1
"""Version of the packing format, which is part of every cache entry's `identity`."""
ALWAYS_VERIFIED_BYTES = 64 << 20
"""Size in bytes up to which `verify` always checks the CRC of tokens.bin (30 ms). Larger files are checked only if `thorough`."""


@dataclass(frozen=True)
class PackProgress:
    """The contents of progress.json."""

    tokens: int = 0
    documents: int = 0
    empty: int = 0
    """Number of documents that were left out because their text is empty or null."""
    complete: bool = False
    """Whether all data is packed. The length of an epoch is unknown until all data is packed."""
    error: str = ""
    """Error message of the last process that packed text, or "" if that process did not fail."""
    vocab: int = 0
    tokenizer: str = ""
    """SHA-256 of tokenizer.model."""
    corpus: str = ""
    """Hash chain over all packed documents: each document is hashed with the previous document's hash as the key."""
    crc: int = 0
    """CRC-32 of all tokens packed so far."""
    state: dict[str, Any] = field(default_factory=dict)
    """Position from which to resume reading the source. {} is the start."""

    @property
    def itemsize(self) -> int:
        return 2 if self.vocab <= 1 << 16 else 4

    @property
    def dtype(self) -> str:
        """numpy dtype of tokens.bin."""
        return f"<u{self.itemsize}"


class CacheEntry:
    """An entry of the token cache. `identity` contains all inputs that determine the packed tokens, as JSON values."""

    def __init__(self, identity: dict[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
        self.folder = cache_dir() / "tokens" / hashlib.sha256(text.encode()).hexdigest()[:20]
        self.tokenizer = self.folder / "tokenizer.model"
        self.tokens = self.folder / "tokens.bin"
        self._progress = self.folder / "progress.json"

    def document_end(self) -> int:
        """Return the end-of-sentence token, which ends each document."""
        return load_tokenizer(self.tokenizer.read_bytes(), str(self.tokenizer)).eos

    def read(self) -> PackProgress | None:
        """Return the progress record, or None if it is missing or damaged."""
        try:
            value = json.loads(self._progress.read_bytes())
            return PackProgress(**value) if value.pop("checksum") == _checksum(value) else None
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, progress: PackProgress) -> None:
        """Replace the progress record. The recorded tokens must already be in tokens.bin."""
        value = asdict(progress)
        replace_file(self._progress, json.dumps(value | {"checksum": _checksum(value)}).encode())

    def verify(self, thorough: bool = False) -> PackProgress | None:
        """Return the progress record if it matches the files. Otherwise delete record and files, and return None. The caller
        holds the lock."""
        progress = self.read()
        with suppress(FileNotFoundError):
            if progress and hashlib.sha256(self.tokenizer.read_bytes()).hexdigest() == progress.tokenizer:
                size = progress.tokens * progress.itemsize
                unread = size > ALWAYS_VERIFIED_BYTES and not thorough and self.tokens.stat().st_size >= size
                if unread or checksum(self.tokens, size) == (size, progress.crc):
                    return progress
        for path in (self._progress, self.tokens, self.tokenizer):  # readers still see the tokens they have mapped
            path.unlink(missing_ok=True)
        return None

    @contextmanager
    def lock(self, *, wait: bool = True, exclusive: bool = True) -> Iterator[bool]:
        """Take the lock and yield True, or yield False if `wait` is false and another process holds the lock."""
        how = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context((self.folder / ".lock").open("ab")), how)
                locked = True
            except BlockingIOError:
                locked = False
            except OSError as error:  # also raised by a file system without locks
                raise ConfigError(
                    f"cannot lock the cache entry {self.folder} ({error.strerror}); set MESHRUNNER_CACHE to another directory"
                ) from None
            yield locked

    def is_locked(self) -> bool:
        if not self.folder.is_dir():
            return False
        with self.lock(wait=False, exclusive=False) as free:
            return not free


def sequence_count(tokens: int, seq_len: int) -> int:
    """Return the number of sequences in `tokens` tokens. A sequence's last target is the first token of the next sequence."""
    return max(0, (tokens - 1) // seq_len)


def check_length(progress: PackProgress, spec: DataSpec) -> None:
    """Raise ConfigError if the data to train on is complete and shorter than one sequence."""
    if spec.held_out is None and progress.complete and sequence_count(progress.tokens, spec.seq_len) == 0:
        raise ConfigError(
            f"seq_len({spec.seq_len}) + 1 is more than the {progress.tokens} tokens of the data; lower seq_len or use more data"
            + ", or lower eval.share" * (spec.share > 0)
        )


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""The cache directory, and files that are replaced atomically and verified by size and CRC-32. Only regular files are read,
because reading a pipe would block."""

import os
import stat
import zlib
from pathlib import Path
from typing import BinaryIO

from meshrunner.recipes.errors import ConfigError

CHUNK_BYTES = 1 << 20


def cache_dir() -> Path:
    """Return MESHRUNNER_CACHE or, if unset, `meshrunner` in the user's cache directory. Raise ConfigError if not writable."""
    named = os.environ.get("MESHRUNNER_CACHE")
    folder = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "meshrunner")
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise ConfigError(
            f"cannot write to the cache directory {folder} ({why}); set MESHRUNNER_CACHE to another directory"
        )
    return folder


def check_regular(path: Path, limit: int | None = None) -> None:
    """Raise ValueError if a path is not a regular file or has more than `limit` bytes. The message states the reason."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if limit is not None and found.st_size > limit:
        raise ValueError(f"it has {found.st_size:,} bytes, more than the limit of {limit:,}")


def open_regular(path: Path, limit: int | None = None) -> BinaryIO:
    """Open a file for reading. Raises the same ValueError as `check_regular`."""
    check_regular(path, limit)
    return path.open("rb")


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes. Raises the same ValueError as `check_regular`."""
    with open_regular(path, limit) as file:
        return file.read(limit)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably. A reader sees either the old or the new content, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def checksum(path: Path, size: int | None = None) -> tuple[int, int]:
    """Return (bytes, CRC-32) of a file, or of its first `size` bytes."""
    read = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES if size is None else min(CHUNK_BYTES, size - read)):
            read, crc = read + len(chunk), zlib.crc32(chunk, crc)
    return read, crc

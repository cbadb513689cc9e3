"""Files that survive a killed process: replaced atomically, verified by size and CRC-32."""

from __future__ import annotations

import os
import secrets
import zlib
from pathlib import Path

CHUNK_BYTES = 1 << 20


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably: a reader sees the old content or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def checksum(path: Path, size: int | None = None) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, or of its first `size` bytes."""
    read = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES if size is None else min(CHUNK_BYTES, size - read)):
            read, crc = read + len(chunk), zlib.crc32(chunk, crc)
    return read, crc

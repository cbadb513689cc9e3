"""Files that survive a killed process: replaced as a whole, recognised by their size and CRC-32."""

from __future__ import annotations

import os
import secrets
import zlib
from pathlib import Path

PIECE = 1 << 20


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one, on the disk, never half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def checksum(path: Path, size: int | None = None) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, or of its first `size` bytes."""
    read = crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE if size is None else min(PIECE, size - read)):
            read, crc = read + len(piece), zlib.crc32(piece, crc)
    return read, crc

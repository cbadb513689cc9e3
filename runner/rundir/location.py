"""Where a directory is: it may be renamed while it is in use."""

from __future__ import annotations

import os
from pathlib import Path


class Location:
    """A directory that is found again after it was moved within its file system. A context manager, or used until the end."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no directory."""
        self.path = path
        self._opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> Location:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._opened)

    def now(self) -> Path | None:
        """The directory's path; None if it was removed."""
        if self.path.is_dir():
            return self.path
        moved = Path(f"/proc/self/fd/{self._opened}").readlink()  # ends with " (deleted)" if it was removed
        return moved if moved.is_dir() else None

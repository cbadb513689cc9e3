"""Integers that a process shares with its children."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from typing import Any

BYTES = 8


class SharedIntegers:
    """
    A fixed number of integers in memory that children see, too, 0 at first. Without a lock: each integer has one writer.

    In a file without a name, so that it needs neither /dev/shm nor a folder for temporary files, as multiprocessing's do.
    """

    def __init__(self, count: int, file: int | None = None) -> None:
        """file: descriptor of the file that a parent has created."""
        self._file = os.memfd_create("meshrunner") if file is None else file
        weakref.finalize(self, os.close, self._file)
        if file is None:
            os.ftruncate(self._file, count * BYTES)
        self._values = memoryview(mmap.mmap(self._file, count * BYTES)).cast("q")

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values.tolist())

    def __getitem__(self, index: int) -> int:
        return self._values[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._values[index] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (len(self), DupFd(self._file))


def _inherited(count: int, file: Any) -> SharedIntegers:
    return SharedIntegers(count, file.detach())

"""Integers in memory that a process shares with its children."""

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
    A fixed number of integers, initially 0, shared with child processes. There is no lock: each integer has one writer.

    They are in an anonymous file (memfd), which needs neither /dev/shm nor a temporary folder, unlike multiprocessing's arrays.
    """

    def __init__(self, count: int, file: int | None = None) -> None:
        """Create the memory, or map the parent's `file` descriptor."""
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

"""The standard streams of a command, wherever it was started: closed, into a full disk, into a pipe that nobody reads."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

STREAMS = ("stdin", "stdout", "stderr")


class _Output(io.FileIO):
    """A file that never fails to be written: what cannot be written is dropped."""

    problem: OSError | None = None
    """The first failure, unless nobody reads any more."""

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # not blocking, and the reader is slow
                select.select([], [self], [])
            return written
        except OSError as error:
            if self.problem is None and error.errno != errno.EPIPE:
                self.problem = error
                if self.fileno() == 1:
                    print(f"meshrunner: stdout cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            return memoryview(data).nbytes


def secure_streams() -> None:
    """
    Open closed standard streams on /dev/null, and replace sys.stdout and sys.stderr by streams that never raise OSError.

    To be called before anything opens a file, which would take the place of a closed stream: workers write to it.
    """
    for number, name in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for number, name in enumerate(STREAMS[1:], 1):
        stream = getattr(sys, name)
        output = io.TextIOWrapper(
            io.BufferedWriter(_Output(number, "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",  # a path may hold what the terminal cannot show
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, output)


def output_is_lost() -> bool:
    """Write what is buffered; whether something printed to stdout could not be written, although somebody waits for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", None)
    return isinstance(raw, _Output) and raw.problem is not None

"""Replaces the standard streams, so that a closed stream, a full disk or a pipe without a reader raises no error."""

from __future__ import annotations

import errno
import io
import os
import select
import sys

TYPE_CHECKING = False  # importing it from `typing` would slow down `--help`
if TYPE_CHECKING:
    from typing import Any

STREAMS = ("stdin", "stdout", "stderr")


class _Output(io.FileIO):
    """A file whose writes never fail. Data that cannot be written is lost."""

    problem: OSError | None = None
    """The first write error other than a closed pipe; None if there was none."""

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # a non-blocking stream with a slow reader
                select.select([], [self], [])
            return written
        except OSError as error:
            if self.problem is None and error.errno != errno.EPIPE:
                self.problem = error
                if self.fileno() == 1:
                    print(f"meshrunner: stdout cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            return memoryview(data).nbytes


def secure_streams() -> None:
    """Open /dev/null in place of closed standard streams. Replace sys.stdout and sys.stderr by streams that never raise OSError.
    Call this function before a file is opened. Otherwise, the file could get the descriptor of a closed stream, and the output
    of workers would go to this file."""
    for number, name in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: `number`
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for number, name in enumerate(STREAMS[1:], 1):
        stream = getattr(sys, name)
        output = io.TextIOWrapper(
            io.BufferedWriter(_Output(number, "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",  # a path may contain characters that the terminal cannot show
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, output)


def output_is_lost() -> bool:
    """Flush stdout and stderr. Return whether a write to stdout failed for a reason other than a closed pipe."""
    sys.stdout.flush()
    sys.stderr.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Output) and raw.problem is not None

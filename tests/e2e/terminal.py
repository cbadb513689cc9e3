"""A command at a terminal: what a person in front of it has seen, and what stands on the screen, by a terminal's own rules."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from contextlib import suppress
from pathlib import Path

import pyte

from tests.e2e.command import BOUND_S, PROGRAM

CLEAR_UP = re.compile(r"\r?(?:\x1b\[2K|\x1b\[1A)+")
"""How a live table is wiped before it is drawn again."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`meshrunner ...` with stdout and stderr on a pseudo terminal of some size."""

    def __init__(self, *arguments: str, cwd: Path, lines: int = 40, columns: int = 120) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
        self.lines, self.columns = lines, columns
        self.process = subprocess.Popen(
            [PROGRAM, *arguments],
            cwd=cwd,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._master = ours
        self._seen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # how a pseudo terminal says that nobody writes any more
            while chunk := os.read(self._master, 65536):
                self._seen += chunk

    def wait(self, within: float = BOUND_S) -> int:
        """Wait for the command's end; its exit status."""
        code = self.process.wait(within)
        self._reader.join(within)
        os.close(self._master)
        return code

    @property
    def frames(self) -> list[str]:
        """What was shown, cut wherever something was wiped to be drawn again; without control characters."""
        text = self._seen.decode(errors="replace").replace("\r\n", "\n")
        return [CONTROL.sub("", frame) for frame in CLEAR_UP.split(text)]

    def frame(self, *words: str) -> str:
        """The first frame that holds all these words; empty when there is none."""
        return next((frame for frame in self.frames if all(word in frame for word in words)), "")

    @property
    def page(self) -> list[str]:
        """Every line that the command left, those that have scrolled off the screen included; without empty ones at the end."""
        screen = pyte.HistoryScreen(self.columns, self.lines, history=100_000)
        pyte.ByteStream(screen).feed(self._seen)
        above = ["".join(line[i].data for i in range(self.columns)).rstrip() for line in screen.history.top]
        return "\n".join([*above, *(line.rstrip() for line in screen.display)]).rstrip().split("\n")

    @property
    def screens(self) -> list[list[str]]:
        """What stood on the screen each time before something was wiped to be drawn again, and at the end."""
        screen = pyte.Screen(self.columns, self.lines)
        stream = pyte.ByteStream(screen)
        found, begin = [], 0
        for wipe in [*re.finditer(CLEAR_UP.pattern.encode(), self._seen), None]:
            end = wipe.start() if wipe else len(self._seen)
            stream.feed(self._seen[begin:end])
            found.append([line.rstrip() for line in screen.display])
            begin = end
        return found

    @property
    def shows_cursor(self) -> bool:
        """Whether the cursor, hidden while a table lives, is visible again."""
        return self._seen.rfind(b"\x1b[?25h") > self._seen.rfind(b"\x1b[?25l")

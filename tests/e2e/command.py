"""Running `meshrunner` as a user does: a process of its own in a folder of its own, watched from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Any

import psutil

PROGRAM = str(Path(sys.executable).with_name("meshrunner"))
BOUND_S = 300.0
"""Longer than anything takes on a busy machine: past it a test hangs."""
SCREEN = 30
"""Lines of a terminal window that is not small."""
SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""Put into the environment by importing inductor, in whichever process of the tests did; a user's shell has not got it."""
SLOW_WORK = re.compile(r"^(composing|checking|predicting|writing) .* \.\.\.\n", re.MULTILINE)
"""What a command says on stderr of work before a run, where that takes seconds: on a machine that is busy with tests."""
TINY = (
    "model.dim=32",
    "model.n_layers=1",
    "model.n_heads=2",
    "model.n_kv_heads=2",
    "model.ffn_dim=64",
    "model.vocab_size=300",
    "data=random",
    "seq_len=16",
    "micro_batch=1",
    "steps=3",
    "measure_after=0",
    "tracker=none",
    "hardware=cpu",
    "launch.workers=2",
    "launch.threads=1",
)


def until(condition: Callable[[], Any], within: float = BOUND_S) -> Any:
    """Poll until a condition holds; returns its value."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within:g} s"
        time.sleep(0.01)
    return value


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"exit status {self.code} after {self.seconds:.1f} s\n{self.out}\n--- stderr:\n{self.err}"

    @property
    def own_words(self) -> str:
        """What the command says by itself: without the lines that it quotes, indented, from the end of a rank's log."""
        quoted = re.compile(r"^(the end of \S+\.log:)\n(?:  .*\n)*", re.MULTILINE)
        return quoted.sub(r"\1\n", self.err) + self.out

    def check_manners(self) -> Ended:
        """At most one screen, and no traceback but a rank's own."""
        assert "Traceback" not in self.own_words, self
        assert len(self.err.splitlines()) <= SCREEN, self
        return self


class Command:
    """`meshrunner ...` in a folder, leader of a session: whoever is left in the session was left behind by it."""

    def __init__(self, *arguments: str, cwd: Path, program: Iterable[str] = (PROGRAM,), **environment: str) -> None:
        self.cwd = cwd
        self.began = time.monotonic()
        # Files, not pipes: a process that is left behind would keep a pipe open, and waiting for its end would hang.
        self.files = [cwd / f".{name}{time.monotonic_ns()}" for name in ("out", "err")]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*program, *arguments],
                cwd=cwd,
                env={k: v for k, v in os.environ.items() if k != SET_BY_TORCH} | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.others():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def wait(self, within: float = BOUND_S) -> Ended:
        """Wait for the command's end."""
        code = self.process.wait(within)
        out, err = (file.read_text(errors="replace") for file in self.files)
        err = SLOW_WORK.sub("", err)
        return Ended(code, out, err, time.monotonic() - self.began)

    def others(self) -> list[psutil.Process]:
        """The living processes of the session, without the command itself."""
        found = []
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if pid != self.pid and os.getsid(pid) == self.pid:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def check_nobody_left(self, within: float = BOUND_S) -> None:
        """Every process of the session is gone, or soon will be: a forkserver first ends its imports."""
        deadline = time.monotonic() + within
        while left := self.others():
            assert time.monotonic() < deadline, f"left behind after {within:g} s: {left}"
            time.sleep(0.02)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Poll until a condition holds, which it never will once the command has ended; returns its value."""
        value: Any = None

        def fulfilled() -> bool:
            nonlocal value
            over = self.process.poll() is not None
            value = condition()
            assert value or not over, f"the command has ended: {self.wait()}"
            return bool(value)

        until(fulfilled)
        return value

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.pid, signal.SIGINT)

    def forkserver(self) -> psutil.Process | None:
        """The process that starts the workers."""
        for process in self.others():
            with suppress(psutil.NoSuchProcess):
                if process.ppid() == self.pid and any("forkserver" in word for word in process.cmdline()):
                    return process
        return None


def meshrunner(*arguments: str, cwd: Path, within: float = BOUND_S, **environment: str) -> Ended:
    """Run a command to its end; it must leave nobody behind and tell it on one screen."""
    with Command(*arguments, cwd=cwd, **environment) as command:
        ended = command.wait(within)
        command.check_nobody_left()
    return ended.check_manners()


def run(
    *overrides: str, cwd: Path, flags: Iterable[str] = (), run_dir: str = "out", within: float = BOUND_S, **environ: str
) -> Ended:
    """A tiny run into cwd/out, to its end."""
    return meshrunner("run", *flags, *TINY, f"hydra.run.dir={run_dir}", *overrides, cwd=cwd, within=within, **environ)


def read(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} while there is none."""
    with suppress(FileNotFoundError):
        loaded: dict[str, Any] = json.loads(file.read_text())
        return loaded
    return {}


def status(run_dir: Path) -> dict[str, Any]:
    """`status.json` of a run directory."""
    return read(run_dir / "status.json")


def steps_done(run_dir: Path) -> int:
    """Rows in events.jsonl."""
    with suppress(FileNotFoundError):
        return (run_dir / "events.jsonl").read_text().count("\n")
    return 0


def own_classes(folder: Path) -> None:
    """Put the user's module `faulty` into a folder."""
    copy(Path(__file__).with_name("faulty.py"), folder)

"""Runs a command line in a child process for `meshrunner.run`. The child process writes a receipt, which contains the run or
sweep directory, or an error."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from meshrunner.recipes.errors import ConfigError

VARIABLE = "MESHRUNNER_RECEIPT"
"""Environment variable with the file descriptor to which the child process writes its receipt."""


def run_command(
    flag: str, overrides: Sequence[str], *, output: IO[str] | None = None, directory: Path | None = None
) -> Path:
    """Execute `meshrunner run FLAG OVERRIDES` and return the run or sweep directory. Pass each Ctrl-C to the command. Raise
    ConfigError if the command exits with status 2, KeyboardInterrupt if it was interrupted, and RuntimeError if it fails in
    another way or reports no directory.

    output: file for the command's output instead of this process's terminal or notebook.
    directory: current directory of the command.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: expected a list such as ['steps=5'], got the text {overrides!r}")
    with TemporaryFile("w+") as receipt:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshrunner", "run", flag, *overrides],
            env=os.environ | {VARIABLE: str(receipt.fileno())},
            pass_fds=[receipt.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            process_group=0,  # Ctrl-C in the terminal reaches only this process, which passes it on
        )
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
        receipt.seek(0)
        found = dict(json.loads(line) for line in receipt)
    status, problem = process.returncode, found.get("problem", "")
    if status in (130, -signal.SIGINT):
        raise KeyboardInterrupt(problem)
    if status == 2 and problem:
        raise ConfigError(problem)
    if problem or "folder" not in found:
        raise RuntimeError(problem or f"`meshrunner run` ended with exit status {status} without a run directory")
    return Path(found["folder"])


_receipt: int | None = None


def accept() -> None:
    """Prepare this child process of `run_command` to write the receipt, and to be interrupted when the parent process dies."""
    from meshrunner.runner.process.signals import die_with_parent

    global _receipt
    _receipt = int(os.environ.pop(VARIABLE))
    os.set_inheritable(_receipt, False)
    die_with_parent(signal.SIGTERM)


def passed_on() -> dict[str, str]:
    """Return the environment variable that a program needs to continue the receipt after it has replaced this process (exec).
    Return {} if this process writes no receipt."""
    if _receipt is None:
        return {}
    os.set_inheritable(_receipt, True)
    return {VARIABLE: str(_receipt)}


def record(key: str, value: object) -> bool:
    """Write a key and its value to the receipt for `run_command`. Return False if no process waits for the receipt."""
    if _receipt is not None:
        os.write(_receipt, f"{json.dumps([key, str(value)])}\n".encode())
    return _receipt is not None

"""The folder for temporary files of a command: the forkserver's socket, and those of trackers."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from multiprocessing.process import current_process
from typing import Any

from meshrunner.recipes.errors import ConfigError

VARIABLE = "MESHRUNNER_TEMPORARY"
"""The variable that tells the forkserver the folder."""
LONGEST = 40
"""Bytes of a path in which sockets of meshrunner and of libraries still find room: the kernel allows them 107."""


def temporary_folder() -> str:
    """
    The folder, created at the first call and removed at the end of the command, however it ends.

    Raises:
        ConfigError: no folder can be written.
    """
    # multiprocessing would choose one in TMPDIR, however long that is.
    settings: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is None:
        settings["tempdir"] = _create()
        atexit.register(remove)
    return str(settings["tempdir"])


def _create() -> str:
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"TMPDIR: {error.strerror}") from None
    for parent in (usual, "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(parent)) <= LONGEST:
            try:
                return tempfile.mkdtemp(prefix="meshrunner-", dir=parent)
            except OSError:
                continue
    raise ConfigError(f"TMPDIR: '{usual}' is too long a path for sockets, and /tmp and /var/tmp cannot be written")


def remove() -> None:
    """Remove the folder, if there is one."""
    folder = current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def remove_with_forkserver() -> None:
    """Have the forkserver, which outlives a killed command, remove the folder. Its children end without exit handlers."""
    if folder := os.environ.pop(VARIABLE, None):
        atexit.register(shutil.rmtree, folder, ignore_errors=True)

"""The folder for a command's temporary files: the forkserver's socket and the files of trackers."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from multiprocessing.process import current_process
from typing import Any

from meshrunner.recipes.errors import ConfigError

VARIABLE = "MESHRUNNER_TEMPORARY"
"""The environment variable that passes the folder to the forkserver."""
LONGEST = 40
"""Most bytes of the parent folder's path: the kernel limits the path of a socket, here or of a library, to 107 bytes."""


def temporary_folder() -> str:
    """
    Return the folder. The first call creates it; it is removed when the command ends, even if it is killed.

    Raises:
        ConfigError: no folder can be written.
    """
    # multiprocessing would choose a folder in TMPDIR, however long its path is.
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
    raise ConfigError(f"TMPDIR: '{usual}' is too long a path for sockets, and /tmp and /var/tmp are not writable")


def remove() -> None:
    """Remove the folder if it was created."""
    folder = current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def remove_with_forkserver() -> None:
    """Have the forkserver remove the folder when it exits: it outlives a killed command. Its children run no exit handlers."""
    if folder := os.environ.pop(VARIABLE, None):
        atexit.register(shutil.rmtree, folder, ignore_errors=True)

"""The folder that keeps tokenizers, packed tokens and compiled code between runs."""

from __future__ import annotations

import os
from pathlib import Path

from meshrunner.recipes.errors import ConfigError


def cache_dir() -> Path:
    """
    The folder that MESHRUNNER_CACHE names, by default `meshrunner` in the user's cache directory; created if missing.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    named = os.environ.get("MESHRUNNER_CACHE")
    folder = Path(named or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = folder.expanduser().absolute()
        folder = folder if named else folder / "meshrunner"
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
        why = "Permission denied"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        writable, why = False, getattr(error, "strerror", None) or str(error)
    if not writable:
        raise ConfigError(
            f"the cache folder {folder} cannot be written ({why}); set MESHRUNNER_CACHE to another folder"
        )
    return folder

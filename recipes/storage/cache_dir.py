"""The directory that caches tokenizers, packed tokens and compiled code between runs."""

from __future__ import annotations

import os
from pathlib import Path

from meshrunner.recipes.errors import ConfigError


def cache_dir() -> Path:
    """Return MESHRUNNER_CACHE, or `meshrunner` in the user's cache directory. Raises ConfigError if it cannot be written."""
    named = os.environ.get("MESHRUNNER_CACHE")
    folder = Path(named or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = folder.expanduser().absolute()
        folder = folder if named else folder / "meshrunner"
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise ConfigError(
            f"cannot write to the cache directory {folder} ({why}); set MESHRUNNER_CACHE to another directory"
        )
    return folder

"""Where tokenizers, packed tokens and compiled code are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from meshrunner.recipes.errors import ConfigError


def cache_dir() -> Path:
    """
    The folder named by MESHRUNNER_CACHE, by default `meshrunner` in the user's cache directory; made if missing.

    Raises:
        ConfigError: it cannot be made or written to.
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
        raise ConfigError(f"the cache folder {folder} cannot be written ({why}); name another in MESHRUNNER_CACHE")
    return folder

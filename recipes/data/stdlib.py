"""Text of the Python installation: pydoc's help texts and library sources. The text differs between Python versions."""

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshrunner.recipes.data.documents import SeparableText
from meshrunner.recipes.data.text import Position
from meshrunner.recipes.errors import ConfigError

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
SAMPLE_BYTES = 1_000_000
"""Approximate bytes of source code on which the tokenizer is trained, in addition to all help texts."""


class Stdlib(SeparableText):
    """The default data: Python's help texts and library sources, 12 MB. Packing the 3.5 million tokens takes a few seconds."""

    background: ClassVar[bool] = False

    text: Literal["prose", "sources", "all"]
    """`prose`: pydoc's help texts (0.5 MB); `sources`: the standard library without tests (12 MB); `all`: both."""

    def source(self) -> dict[str, Any]:
        files = [] if self.text == "prose" else library_files()
        return {"stdlib": self.text, "python": sys.version, "files": files}

    def read_documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        before = position.get("read", 0)
        for read, text in enumerate(islice(self._texts(every=1), before, None), start=before + 1):
            yield text, {"read": read}

    def sample(self) -> Iterator[str]:
        files = [] if self.text == "prose" else library_files()
        return self._texts(every=max(1, sum(size for _, size in files) // SAMPLE_BYTES))

    def _texts(self, every: int) -> Iterator[str]:
        """Yield the help texts, sorted by topic, then source files, sorted by path. If `every` is k, yield every k-th file."""
        if self.text != "sources":
            topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
            yield from (topics[name] for name in sorted(topics))
        if self.text != "prose":
            for name, _ in library_files()[::every]:
                yield (library() / name).read_text(encoding="utf-8", errors="replace")


def library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def library_files() -> list[tuple[str, int]]:
    """Return (path relative to `library()`, size in bytes) of each source file except tests, sorted by path."""
    files = []
    for folder, below, names in os.walk(library()):
        below[:] = [name for name in below if "." not in name and name not in EXCLUDED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ConfigError(f"data.text: this Python has no library sources in {library()}; use data.text=prose")
    return sorted((str(file.relative_to(library())), file.stat().st_size) for file in files)

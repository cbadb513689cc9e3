"""Text of every Python installation: the language reference (prose) and the standard library's sources.

It differs between Python versions, so runs on different versions train on different text. The run record has its hash.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshrunner.recipes.data.text import Documents, PackedText
from meshrunner.recipes.errors import ConfigError

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
SAMPLE_BYTES = 1_000_000
"""Bytes of source code that the tokenizer is trained on, in addition to all prose."""


class Stdlib(PackedText):
    """The default data: 12 MB, about 3.5 million tokens, packed in a few seconds before the first run."""

    background: ClassVar[bool] = False

    text: Literal["prose", "sources", "all"]
    """`prose`: pydoc's help texts (0.5 MB); `sources`: the standard library without tests (12 MB); `all`: both."""

    def source(self) -> dict[str, Any]:
        files = [] if self.text == "prose" else library_files()
        return {"stdlib": self.text, "python": sys.version, "files": files}

    def documents(self) -> Documents:
        return StdlibDocuments(prose=self.text != "sources", files=[] if self.text == "prose" else library_files())

    def sample(self) -> Iterator[str]:
        files = [] if self.text == "prose" else library_files()
        every = max(1, sum(size for _, size in files) // SAMPLE_BYTES)
        return StdlibDocuments(prose=self.text != "sources", files=files[::every]).read({})


class StdlibDocuments:
    """The prose, sorted by topic, then the source files, sorted by path."""

    def __init__(self, prose: bool, files: list[tuple[str, int]]) -> None:
        self.prose = prose
        self.files = files
        self._read = 0

    def read(self, state: dict[str, Any]) -> Iterator[str]:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics if self.prose else {}
        files = (library() / name for name, _ in self.files)
        sources = (file.read_text(encoding="utf-8", errors="replace") for file in files)
        before = state.get("read", 0)
        texts = islice(chain((topics[name] for name in sorted(topics)), sources), before, None)
        for number, text in enumerate(texts, start=before + 1):
            self._read = number
            yield text

    def state(self) -> dict[str, Any]:
        return {"read": self._read}


def library() -> Path:
    """Return the directory of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def library_files() -> list[tuple[str, int]]:
    """Return (path below `library()`, bytes) of the standard library's source files without tests, sorted."""
    files = sorted(_walk(str(library()), "")) if library().is_dir() else []
    if not files:
        raise ConfigError(f"data.text: this Python has no library sources in {library()}; use data.text=prose")
    return files


def _walk(folder: str, below: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as items:
        for item in items:
            if item.name.endswith(".py"):
                yield below + item.name, item.stat().st_size
            elif "." not in item.name and item.name not in EXCLUDED_FOLDERS and item.is_dir(follow_symlinks=False):
                yield from _walk(item.path, f"{below}{item.name}/")

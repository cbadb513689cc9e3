"""What jsonl and parquet share: files of this machine, read through `datasets` in streaming mode."""

from __future__ import annotations

import glob
import os
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.data.packing import Documents
from meshrunner.recipes.data.stream import StreamedDocuments
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset


def _given(value: Any) -> Any:
    if value is None or value in ("", "???"):
        raise PydanticCustomError("no_path", "is missing; expected a file, a folder or a glob pattern")
    return value


class LocalText(PackedText):
    """Base class of the options that read files of this machine."""

    builder: ClassVar[str]
    """What `datasets` calls the format."""
    suffixes: ClassVar[tuple[str, ...]]
    """Which files of a folder count."""

    path: Annotated[str, BeforeValidator(_given)]
    """A file, a folder (its files of this format, sub-folders included) or a glob pattern; read in name order."""
    field: str
    """The column that holds the text."""

    @abstractmethod
    def unreadable(self, files: list[str], error: Exception) -> ConfigError:
        """What an exception while reading the files means."""

    def files(self) -> list[str]:
        """Absolute paths, sorted; raises ConfigError when there are none."""
        path = Path(self.path).expanduser().absolute()
        wanted = " or ".join(self.suffixes)
        if path.is_dir():
            found = [str(Path(top) / name) for top, _, names in os.walk(path) for name in names]
            found = [name for name in found if name.endswith(self.suffixes)]
            if not found:
                raise ConfigError(f"data.path: no file in the folder '{path}' ends in {wanted}")
        elif path.exists():
            found = [str(path)]
        elif glob.has_magic(self.path):
            found = [name for name in _matches(str(path)) if Path(name).is_file()]
            if not found:
                raise ConfigError(f"data.path: no file matches '{path}'")
        else:
            raise ConfigError(f"data.path: there is no '{path}'; expected a file, a folder or a glob pattern")
        return sorted(found)

    def source(self) -> dict[str, Any]:
        files = []
        for name in self.files():
            status = Path(name).stat()
            files.append((name, status.st_size, status.st_mtime_ns))
        return {"files": files, "field": self.field, "builder": self.builder}

    def documents(self) -> Documents:
        files = self.files()
        return StreamedDocuments(lambda: self.load(files), self.field, lambda error: self.unreadable(files, error))

    def load(self, files: list[str]) -> IterableDataset:
        """The rows of the files, streaming."""
        from datasets import config, load_dataset

        config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it reports to a server: no business of local files, up to 5 s

        names = [glob.escape(name) for name in files]  # datasets takes every name for a pattern
        return load_dataset(self.builder, data_files=names, split="train", streaming=True, **self.loading())

    def loading(self) -> dict[str, Any]:
        """Further arguments of load_dataset."""
        return {}

    def nothing(self) -> str:
        return f"data.path: there is no text in '{Path(self.path).expanduser().absolute()}', column '{self.field}'"


def _matches(pattern: str) -> list[str]:
    return glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)

"""Local files, JSON lines or Parquet, streamed through `datasets`."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.data.packing import Documents
from meshrunner.recipes.data.stream import StreamedDocuments, first_line, missing_field, not_text
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset


def _not_missing(value: Any) -> Any:
    if value is None or value in ("", "???"):
        raise PydanticCustomError("no_path", "is missing; expected a file, a directory or a glob pattern")
    return value


class LocalText(PackedText):
    """Base class of the options that read local files."""

    builder: ClassVar[str]
    """Name of the format in `datasets`."""
    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of the files that are read from a directory."""

    path: Annotated[str, BeforeValidator(_not_missing)]
    """A file, a directory (its files of this format, recursively) or a glob pattern. Files are read in name order."""
    field: str
    """The column with the text."""

    @property
    def local_path(self) -> str:
        return self.path

    @abstractmethod
    def unreadable(self, files: list[str], error: Exception) -> ConfigError:
        """Return the ConfigError for an exception raised while reading the files."""

    def files(self) -> list[str]:
        """Return absolute paths, sorted. Raises ConfigError if there are none."""
        path = Path(self.path).expanduser().absolute()
        if path.is_dir():
            found = [str(Path(top) / name) for top, _, names in os.walk(path) for name in names]
            found = [name for name in found if name.endswith(self.suffixes)]
            if not found:
                raise ConfigError(f"data.path: no file in the directory '{path}' ends in {' or '.join(self.suffixes)}")
        elif path.exists():
            found = [str(path)]
        elif glob.has_magic(self.path):
            every = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
            found = [name for name in every if Path(name).is_file()]
            if not found:
                raise ConfigError(f"data.path: no file matches '{path}'")
        else:
            raise ConfigError(f"data.path: no such file: '{path}'; expected a file, a directory or a glob pattern")
        return sorted(found)

    def source(self) -> dict[str, Any]:
        found = [(name, Path(name).stat()) for name in self.files()]
        files = [(name, status.st_size, status.st_mtime_ns) for name, status in found]
        return {"files": files, "field": self.field, "builder": self.builder}

    def documents(self) -> Documents:
        files = self.files()
        return StreamedDocuments(
            lambda: self.load(files),
            self.field,
            lambda error: self.unreadable(files, error),
            lambda: self.without_text(files),
        )

    def load(self, files: list[str]) -> IterableDataset:
        """Return the rows of the files, streamed. Raises ConfigError if there are none."""
        from datasets import config, load_dataset

        config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise reading local files reports to a server (up to 5 s)
        names = [glob.escape(name) for name in self.filled(files)]  # datasets treats every name as a pattern
        if not names:
            raise ConfigError(self.no_text_message())
        return load_dataset(self.builder, data_files=names, split="train", streaming=True, **self.loading())

    def filled(self, files: list[str]) -> list[str]:
        """Return the files with any rows. Override this if `datasets` fails on the others."""
        return files

    def loading(self) -> dict[str, Any]:
        """Return additional arguments of load_dataset."""
        return {}

    def without_text(self, files: list[str]) -> ConfigError | None:
        """Return the error for the first of several files whose column is missing or contains no text; None: not known."""
        return None

    def no_text_message(self) -> str:
        path = Path(self.path).expanduser().absolute()
        return f"data.path: no text in '{path}', column '{self.field}'; choose other files or set data.field"


class Jsonl(LocalText):
    """Files with one JSON object per line. `.gz` files are decompressed while they are read."""

    builder: ClassVar[str] = "json"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

    def filled(self, files: list[str]) -> list[str]:
        return [name for name in files if Path(name).stat().st_size]

    def unreadable(self, files: list[str], error: Exception) -> ConfigError:
        for name in files:
            if where := first_bad_line(Path(name)):
                return ConfigError(f'data.path: {where}; expected one JSON object per line, such as {{"text": "..."}}')
        unlike = self.without_text(files)
        return unlike or ConfigError(f"data.path: cannot read '{self.path}' as JSON lines: {first_line(error)}")

    def without_text(self, files: list[str]) -> ConfigError | None:
        for name in files if len(files) > 1 else ():
            with suppress(OSError, ValueError, EOFError, RecursionError), _open(Path(name)) as lines:
                for line in lines:
                    row = json.loads(line) if line.strip() else {self.field: None}
                    if self.field not in row:
                        return missing_field(self.field, list(row), name)
                    if not isinstance(row[self.field], str | None):
                        return not_text(self.field, row[self.field], name)
        return None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file of JSON lines for reading."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def first_bad_line(path: Path) -> str:
    """Describe the first line that is not a JSON object; "" if there is none. pyarrow does not name it."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.lstrip().startswith(b"["):
                    return ""  # datasets also reads a single array
                if line.strip() and not isinstance(json.loads(line.decode("utf-8")), dict):
                    return f"'{path}' line {number} is not a JSON object"
    except UnicodeDecodeError:
        return f"'{path}' line {number} is not UTF-8 text"
    except ValueError as error:
        return f"'{path}' line {number} is not JSON ({error})"
    except RecursionError:
        return f"'{path}' line {number} is nested too deeply"
    except (OSError, EOFError, zlib.error) as error:
        return f"'{path}' cannot be read ({error})"
    return ""


TEXT = ("string", "large_string", "string_view", "null", "dictionary<values=string, indices=int32, ordered=0>")
"""Types of a Parquet column with text."""


class Parquet(LocalText):
    """Parquet files, of which only one column is read."""

    builder: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def filled(self, files: list[str]) -> list[str]:
        """Return the files with any rows. All footers are read, so a bad file is found before anything is tokenised."""
        return [name for name in files if self._rows(name, one_of_many=len(files) > 1)]

    def loading(self) -> dict[str, Any]:
        return {"columns": [self.field]}

    def unreadable(self, files: list[str], error: Exception) -> ConfigError:
        return ConfigError(f"data.path: cannot read '{self.path}' as parquet: {first_line(error)}")

    def _rows(self, name: str, *, one_of_many: bool) -> int:
        """Return the number of rows of a file. Raises ConfigError if it is not parquet or has no text column `field`."""
        from pyarrow.parquet import read_metadata

        try:
            footer = read_metadata(name)
            schema = footer.schema.to_arrow_schema()
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise ConfigError(f"data.path: '{name}' is not a parquet file: {first_line(error)}") from None
        if self.field not in schema.names:
            raise missing_field(self.field, schema.names, name if one_of_many else "")
        if one_of_many and (kind := str(schema.field(self.field).type)) not in TEXT:
            raise ConfigError(f"data.field: the column '{self.field}' of '{name}' contains {kind}, expected text")
        return int(footer.num_rows)

"""Local JSON Lines or Parquet files."""

import glob
import gzip
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError, from_json

from meshrunner.recipes.data.documents import SeparableText, missing_column, text_in
from meshrunner.recipes.data.text import Position
from meshrunner.recipes.errors import ConfigError


def _not_missing(value: Any) -> Any:
    if value in (None, "", "???"):
        raise PydanticCustomError("no_path", "this key is missing; expected a file, a directory or a glob pattern")
    return value


class LocalText(SeparableText):
    """Base class of the options that read local files."""

    suffixes: ClassVar[tuple[str, ...]]
    """File name suffixes of the format. In a directory, other files are ignored."""

    path: Annotated[str, BeforeValidator(_not_missing)]
    """A file, a directory (searched recursively for files of this format) or a glob pattern. Files are read in path order."""
    field: str
    """The column with the text."""

    @abstractmethod
    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a file. Raises ConfigError if the file cannot be read."""

    def check_files(self, names: list[str]) -> None:
        """Raise ConfigError if a file is unusable. Read only a small part of each file, such as its footer."""

    @property
    def local_path(self) -> str:
        return self.path

    def files(self) -> list[str]:
        """Return the sorted absolute paths of the files. Raises ConfigError if there are no files."""
        path = Path(self.path).expanduser().absolute()
        if path.is_dir():
            every = [str(Path(top) / name) for top, _, names in os.walk(path) for name in names]
            found = [name for name in every if name.endswith(self.suffixes)]
            problem = f"no file in the directory '{path}' ends in {' or '.join(self.suffixes)}"
        elif glob.has_magic(self.path) and not path.exists():
            every = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
            found = [name for name in every if Path(name).is_file()]
            problem = f"no file matches '{path}'"
        else:
            found = [str(path)] if path.exists() else []
            problem = f"no such file: '{path}'; expected a file, a directory or a glob pattern"
        if not found:
            raise ConfigError(f"data.path: {problem}")
        return sorted(found)

    def source(self) -> dict[str, Any]:
        found = [(name, Path(name).stat()) for name in self.files()]
        files = [(name, status.st_size, status.st_mtime_ns) for name, status in found]
        return {"files": files, "field": self.field, "format": self.suffixes[0]}

    def read_documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        names = self.files()
        self.check_files(names)
        first, skipped = position.get("file", 0), position.get("rows", 0)
        for number, name in enumerate(names[first:], start=first):
            for read, row in enumerate(islice(self.rows(name), skipped, None), start=skipped + 1):
                text = text_in(row, self.field, name if len(names) > 1 else "")
                yield text, {"file": number, "rows": read}
            skipped = 0

    def no_text_message(self) -> str:
        path = Path(self.path).expanduser().absolute()
        return f"data.path: no text in '{path}', column '{self.field}'; choose other files or set data.field"


class Jsonl(LocalText):
    """Files with one JSON object per line. `.gz` files are decompressed while they are read."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        number = 0
        try:
            with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.strip():
                        continue
                    is_array = number == 1 and line.lstrip().startswith(b"[")
                    rows = from_json(line + file.read()) if is_array else [from_json(line.decode())]
                    if not all(isinstance(row, dict) for row in rows):
                        raise ValueError("it contains a JSON value of another type")
                    yield from rows
            return
        except UnicodeDecodeError:
            what = f"line {number} is not UTF-8 text"
        except ValueError as error:
            what = f"line {number} is not a JSON object ({error})"
        except (OSError, EOFError, zlib.error) as error:
            what = f"cannot be read ({error})"
        raise ConfigError(f'data.path: \'{name}\' {what}; expected one JSON object per line, such as {{"text": "..."}}')


class Parquet(LocalText):
    """Parquet files. Only the text column of a file is read."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def check_files(self, names: list[str]) -> None:
        """Check the footer of each file, so that a bad file is found before anything is tokenised."""
        from pyarrow.parquet import read_schema

        for name in names:
            try:
                columns = read_schema(name).names
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                raise ConfigError(f"data.path: '{name}' is not a parquet file: {error}") from None
            if self.field not in columns:
                raise missing_column(self.field, columns, name if len(names) > 1 else "")

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(name) as file:
                for batch in file.iter_batches(columns=[self.field]):
                    yield from batch.to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.path: cannot read '{name}' as parquet: {error}") from None

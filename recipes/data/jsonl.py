"""JSON lines from local files: one object per line, the text in one of its keys."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from meshrunner.recipes.data.local import LocalText
from meshrunner.recipes.data.stream import first_line
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset


class Jsonl(LocalText):
    """Files of one JSON object per line; `.gz` is unpacked on the fly."""

    builder: ClassVar[str] = "json"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

    def load(self, files: list[str]) -> IterableDataset:
        files = [name for name in files if Path(name).stat().st_size]  # datasets stumbles over an empty file
        if not files:
            raise ConfigError(self.nothing())
        return super().load(files)

    def unreadable(self, files: list[str], error: Exception) -> ConfigError:
        for name in files:
            if where := first_bad_line(Path(name)):
                return ConfigError(f'data.path: {where}; expected one JSON object per line, such as {{"text": "..."}}')
        return ConfigError(f"data.path: cannot read '{self.path}' as JSON lines: {first_line(error)}")


def first_bad_line(path: Path) -> str:
    """Where and why a file is no JSON lines; empty when it is. pyarrow names neither the file nor the line."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.lstrip().startswith(b"["):
                    return ""  # one array instead of lines: datasets reads that, too
                if line.strip() and not isinstance(json.loads(line.decode("utf-8")), dict):
                    return f"'{path}' line {number} is no JSON object"
    except UnicodeDecodeError:
        return f"'{path}' line {number} is not UTF-8 text"
    except ValueError as error:
        return f"'{path}' line {number} is not JSON ({error})"
    except (OSError, EOFError) as error:
        return f"'{path}' cannot be read ({error})"
    return ""

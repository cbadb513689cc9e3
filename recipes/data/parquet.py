"""Parquet from local files: the text in one column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from meshrunner.recipes.data.local import LocalText
from meshrunner.recipes.data.stream import first_line, missing_field
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset


class Parquet(LocalText):
    """Parquet files, of which one column is read."""

    builder: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def load(self, files: list[str]) -> IterableDataset:
        """The rows; reads all footers first, so that a file that is none is found before anything is tokenised."""
        filled = []
        for name in files:
            columns, rows = _footer(name)
            if self.field not in columns:
                raise missing_field(self.field, columns)
            if rows:  # datasets stumbles over a file without
                filled.append(name)
        if not filled:
            raise ConfigError(self.nothing())
        return super().load(filled)

    def loading(self) -> dict[str, Any]:
        return {"columns": [self.field]}

    def unreadable(self, files: list[str], error: Exception) -> ConfigError:
        return ConfigError(f"data.path: cannot read '{self.path}' as parquet: {first_line(error)}")


def _footer(name: str) -> tuple[list[str], int]:
    """The columns of a file and its number of rows."""
    from pyarrow.parquet import read_metadata

    try:
        footer = read_metadata(name)
        return list(footer.schema.to_arrow_schema().names), int(footer.num_rows)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ConfigError(f"data.path: '{name}' is not a parquet file: {first_line(error)}") from None

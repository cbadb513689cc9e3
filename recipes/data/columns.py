"""Read the text column of a row."""

from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean


def text_in(row: dict[str, Any], column: str, file: str = "") -> str:
    """Return the text in a column ("" for null). Raise ConfigError (naming `file`) if the column is missing or not text."""
    if column not in row:
        raise missing_column(column, list(row), file)
    text = row[column]
    if not isinstance(text, str | None):
        where = f" of '{file}'" if file else ""
        raise ConfigError(
            f"data.field: the column '{column}'{where} must contain text, not {type(text).__name__}: {str(text)[:80]!r}"
        )
    return text or ""


def missing_column(column: str, columns: list[str], file: str = "") -> ConfigError:
    """Return the error for a missing column. file: name of the file for the message, or "" for no name."""
    hint, where = did_you_mean(column, columns), f" in '{file}'" if file else ""
    return ConfigError(f"data.field: no column '{column}'{where}.{hint} Columns: {', '.join(columns)}")

"""Read documents from a column of the data's rows, and define `data.documents`, which can limit attention to one document."""

from typing import Any, Literal

from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean


class SeparableText(PackedText):
    """Base class of the options that can limit attention to the tokens of one document."""

    documents: Literal["joined", "separate"] = "joined"
    """Attention across documents. joined: a token attends to all earlier tokens of its sequence; separate: only to tokens of its
    own document, and positions start at 0 in each document."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if callable(vars(cls).get("documents")):
            raise TypeError(f"{cls.__name__}.documents is a key, not a method; rename the method to read_documents")

    @property
    def separates_documents(self) -> bool:
        return self.documents == "separate"


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
    """Return the error for a missing column. file: file to name in the message, or "" to name no file."""
    hint, where = did_you_mean(column, columns), f" in '{file}'" if file else ""
    return ConfigError(f"data.field: no column '{column}'{where}.{hint} Columns: {', '.join(columns)}")

"""Texts from one column of a `datasets.IterableDataset`, resumable at any row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean

if TYPE_CHECKING:
    from datasets import IterableDataset


class StreamedDocuments:
    """The texts of one column, in order. Null and empty rows are skipped."""

    def __init__(
        self,
        load: Callable[[], IterableDataset],
        field: str,
        explain: Callable[[Exception], ConfigError | None],
        locate: Callable[[], ConfigError | None] = lambda: None,
    ) -> None:
        """
        Args:
            load: loads the data set in streaming mode.
            field: the column with the text.
            explain: returns the ConfigError for an exception of `datasets`, or None if the exception is unexpected.
            locate: returns the ConfigError that names the file of a row without text, or None if the file is not known.
        """
        self._load = load
        self._field = field
        self._explain = explain
        self._locate = locate
        self._rows: IterableDataset | None = None

    def read(self, state: dict[str, Any]) -> Iterator[str]:
        _give_tqdm_a_lock()
        try:
            rows = self._rows = self._load()
            if state:
                rows.load_state_dict(state)
            for row in rows:
                if text := self._text(row):
                    yield text
        except ConfigError:
            raise
        except Exception as error:  # datasets passes on whatever pyarrow, fsspec or the network raise
            if explained := self._explain(error):
                raise explained from error
            raise

    def state(self) -> dict[str, Any]:
        assert self._rows is not None
        state: dict[str, Any] = self._rows.state_dict()
        return state

    def _text(self, row: dict[str, Any]) -> str:
        if self._field not in row:
            raise self._locate() or missing_field(self._field, list(row))
        text = row[self._field]
        if text is not None and not isinstance(text, str):
            raise self._locate() or not_text(self._field, text)
        return text or ""


def _give_tqdm_a_lock() -> None:
    """Give tqdm a thread lock. Its default is a semaphore; a killed producer leaks it and multiprocessing warns."""
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())


def missing_field(field: str, columns: list[str], file: str = "") -> ConfigError:
    """Return the error for a missing column."""
    hint, where = did_you_mean(field, columns), f" in '{file}'" if file else ""
    return ConfigError(f"data.field: no column '{field}'{where}.{hint} Columns: {', '.join(columns)}")


def not_text(field: str, value: Any, file: str = "") -> ConfigError:
    """Return the error for a value that is not text."""
    where, kind = f" of '{file}'" if file else "", type(value).__name__
    return ConfigError(
        f"data.field: the column '{field}'{where} contains {kind}, expected text; got {str(value)[:80]!r}"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, at most 300 characters, or its type if it has no message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]

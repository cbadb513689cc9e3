"""Texts out of a `datasets.IterableDataset`: one column, read row by row, which can be resumed exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean

if TYPE_CHECKING:
    from datasets import IterableDataset


class StreamedDocuments:
    """The rows of one column, in order; rows that are null or empty are skipped."""

    def __init__(
        self, load: Callable[[], IterableDataset], field: str, explain: Callable[[Exception], ConfigError | None]
    ) -> None:
        """
        Args:
            load: makes the data set, in streaming mode.
            field: the column with the text.
            explain: what an exception of `datasets` means to the user; None: it is unexpected and stays as it is.
        """
        self._load = load
        self._field = field
        self._explain = explain
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
        except Exception as error:  # datasets lets through what its readers, pyarrow, fsspec or the network raise
            if explained := self._explain(error):
                raise explained from error
            raise

    def state(self) -> dict[str, Any]:
        assert self._rows is not None
        state: dict[str, Any] = self._rows.state_dict()
        return state

    def _text(self, row: dict[str, Any]) -> str:
        if self._field not in row:
            raise missing_field(self._field, list(row))
        text = row[self._field]
        if text is not None and not isinstance(text, str):
            raise ConfigError(
                f"data.field: the column '{self._field}' holds {type(text).__name__}, expected text: {str(text)[:80]!r}"
            )
        return text or ""


def _give_tqdm_a_lock() -> None:
    """Else `datasets` makes its progress bars share a semaphore between processes, which a killed producer leaves behind
    and multiprocessing then complains about on the terminal."""
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())


def missing_field(field: str, columns: list[str]) -> ConfigError:
    """The error for a column that is not there."""
    hint = did_you_mean(field, columns)
    return ConfigError(f"data.field: there is no column '{field}'.{hint} Columns: {', '.join(columns)}")


def first_line(error: Exception) -> str:
    """An exception's message, or its type where it has none, short enough for one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]

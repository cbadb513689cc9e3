"""Data sets of the Hugging Face hub, streamed. Only the text that training reaches is downloaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.data.text import Documents, PackedText, text_in
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset

PROBE_TIMEOUT_S = 10.0
"""Seconds the hub may take to answer a probe. Without the probe, the retries of the hub's client take over 25 s."""


class HuggingFace(PackedText):
    """A split of a hub data set, in order. Text is downloaded once and cached."""

    name: str
    """Name on the hub, such as `allenai/c4`, or a local directory that `datasets` can load."""
    subset: str | None
    """The data set's configuration, such as `en`; null if it has only one."""
    split: str
    """The split, such as `train`."""
    revision: str | None
    """A commit or tag of the data set; null: its current state. Cached text is not updated."""
    field: str
    """The column with the text."""

    def source(self) -> dict[str, Any]:
        parts = {"name": self.name, "subset": self.subset, "split": self.split, "revision": self.revision}
        return {"hub": parts, "field": self.field}

    def documents(self) -> Documents:
        return HubDocuments(self)

    def no_text_message(self) -> str:
        return f"data.name: no text in '{self.name}', split '{self.split}', column '{self.field}'; choose another split or column"

    def load(self) -> IterableDataset:
        """Return the data set in streaming mode."""
        from datasets import load_dataset

        if not Path(self.name).is_dir() and (why := why_unreachable()):
            raise ConnectionError(why)
        return load_dataset(self.name, self.subset, split=self.split, revision=self.revision, streaming=True)

    def explain(self, error: Exception) -> ConfigError | None:
        """Return the error to show for an exception of `datasets`; None if the exception is unexpected."""
        from datasets.exceptions import DatasetNotFoundError

        why = first_line(error)
        if isinstance(error, DatasetNotFoundError):
            return ConfigError(f"data.name: {why} (a private or gated data set needs HF_TOKEN)")
        if isinstance(error, ConnectionError | TimeoutError) or "httpx" in type(error).__module__:
            return ConfigError(
                f"data: cannot reach the Hugging Face hub for '{self.name}' ({why}); use local files with data=jsonl "
                "data.path=... or data=parquet data.path=..."
            )
        if "BuilderConfig" in why or "Config name is missing" in why:
            return ConfigError(f"data.subset: '{self.name}': {' '.join(str(error).split())[:600]}")
        if "Bad split" in why:
            return ConfigError(f"data.split: '{self.name}': {why}")
        if isinstance(error, OSError | ValueError):
            return ConfigError(f"data: cannot read '{self.name}': {type(error).__name__}: {why}")
        return None


class HubDocuments:
    """The texts of one column, in order."""

    def __init__(self, data: HuggingFace) -> None:
        self._data = data
        self._rows: IterableDataset | None = None

    def read(self, state: dict[str, Any]) -> Iterator[str]:
        from tqdm import tqdm

        # A killed producer would leak tqdm's default lock, a semaphore, and multiprocessing would warn.
        tqdm.set_lock(threading.RLock())
        try:
            rows = self._rows = self._data.load()
            if state:
                rows.load_state_dict(state)
            for row in rows:
                yield text_in(row, self._data.field)
        except ConfigError:
            raise
        except Exception as error:  # datasets passes on whatever pyarrow, fsspec or the network raise
            if explained := self._data.explain(error):
                raise explained from error
            raise

    def state(self) -> dict[str, Any]:
        assert self._rows is not None
        state: dict[str, Any] = self._rows.state_dict()
        return state


def why_unreachable() -> str:
    """Return why the hub, or the mirror in HF_ENDPOINT, cannot be reached; "" if it can."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # exported, but lazily

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    outcome = [f"{constants.ENDPOINT} did not answer within {PROBE_TIMEOUT_S:.0f} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PROBE_TIMEOUT_S)
            outcome[0] = ""
        except Exception as error:
            outcome[0] = first_line(error)

    # In a thread, because a name lookup has no timeout.
    probe = threading.Thread(target=ask, daemon=True, name="hub probe")
    probe.start()
    probe.join(PROBE_TIMEOUT_S + 2)
    return outcome[0]


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, at most 300 characters, or its type if it has no message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]

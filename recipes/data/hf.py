"""Data sets streamed from the Hugging Face hub. Only the text that training reaches is downloaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.data.documents import SeparableText, text_in
from meshrunner.recipes.data.text import Position
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset


class HuggingFace(SeparableText):
    """One split of a data set on the hub. Rows are read in order. Text is downloaded once, and its tokens are cached."""

    name: str
    """Name on the hub, such as `allenai/c4`, or a local directory that `datasets` can load."""
    subset: str | None
    """The data set's configuration, such as `en`; null if the data set has only one configuration."""
    split: str
    """The split, such as `train`."""
    revision: str | None
    """A commit or tag of the data set; null: the newest revision. Tokens that are already cached are not updated."""
    field: str
    """The column with the text."""

    def source(self) -> dict[str, Any]:
        parts = {"name": self.name, "subset": self.subset, "split": self.split, "revision": self.revision}
        return {"hub": parts, "field": self.field}

    def read_documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        from tqdm import tqdm

        # A killed producer would leak tqdm's default lock, a semaphore, and multiprocessing would warn.
        tqdm.set_lock(threading.RLock())
        try:
            rows = self.load()
            if position:
                rows.load_state_dict(position)
            for row in rows:
                yield text_in(row, self.field), rows.state_dict()
        except Exception as error:  # datasets re-raises the exceptions of pyarrow, fsspec and the network
            if explained := self.explain(error):
                raise explained from error
            raise

    def no_text_message(self) -> str:
        return f"data.name: no text in '{self.name}', split '{self.split}', column '{self.field}'; choose another split or column"

    def load(self) -> IterableDataset:
        from datasets import load_dataset

        if not Path(self.name).is_dir() and (why := why_unreachable()):
            raise ConnectionError(why)
        return load_dataset(self.name, self.subset, split=self.split, revision=self.revision, streaming=True)

    def explain(self, error: Exception) -> ConfigError | None:
        """Return the ConfigError that explains an exception of `datasets` to the user, or None if the exception is unexpected."""
        from datasets.exceptions import DatasetNotFoundError

        why = first_line(error)
        if isinstance(error, DatasetNotFoundError):
            return ConfigError(f"data.name: {why} (a private or gated data set needs HF_TOKEN)")
        if isinstance(error, ConnectionError | TimeoutError) or "httpx" in type(error).__module__:
            return ConfigError(
                f"data: cannot reach the Hugging Face hub for '{self.name}' ({why}); use local files with data=jsonl "
                "data.path=... or data=parquet data.path=..."
            )
        if isinstance(error, OSError | ValueError):  # a ValueError if the subset or the split is wrong
            keys = {"BuilderConf": "data.subset", "Config name": "data.subset", "Bad split: ": "data.split"}
            key = keys.get(why[:11], "data")
            return ConfigError(f"{key}: cannot read '{self.name}': {' '.join(str(error).split())[:600]}")
        return None


def why_unreachable() -> str:
    """Return the reason why the hub or its mirror is unreachable; "" if there is none. Unlike the hub's client, do not retry."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # exported, but lazily

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, cut to 300 characters, or the exception's type if the message is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
